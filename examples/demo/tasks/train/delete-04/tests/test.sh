#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/theme && "$(<conf/theme)" == $'tmp/cache' ]] &&
   [[ -f data/note && "$(<data/note)" == $'94' ]] &&
   [[ -f docs/index && "$(<docs/index)" == $'blue' ]] &&
   [[ -f docs/list && "$(<docs/list)" == $'91' ]] &&
   [[ -f src/task.py && "$(<src/task.py)" == $'cache = 29' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
