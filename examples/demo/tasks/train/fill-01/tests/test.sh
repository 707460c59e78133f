#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/level && "$(<data/level)" == $'salt' ]] &&
   [[ -f data/size && "$(<data/size)" == $'89' ]] &&
   [[ -f docs/theme && "$(<docs/theme)" == $'89' ]] &&
   [[ -f src/task.py && "$(<src/task.py)" == $'depth = 17' ]] &&
   [[ -f tmp/index && "$(<tmp/index)" == $'fox' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
