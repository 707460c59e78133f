#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'tmp/key' ]] &&
   [[ -f conf/theme && "$(<conf/theme)" == $'21' ]] &&
   [[ -f data/index && "$(<data/index)" == $'gold' ]] &&
   [[ -f docs/level && "$(<docs/level)" == $'zinc' ]] &&
   [[ -f docs/task && "$(<docs/task)" == $'fox' ]] &&
   [[ -f tmp/key && "$(<tmp/key)" == $'pine' ]] &&
   [[ -f tmp/list && "$(<tmp/list)" == $'blue' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
