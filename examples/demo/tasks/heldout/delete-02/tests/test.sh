#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'13' ]] &&
   [[ -f data/node && "$(<data/node)" == $'tmp/task' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'owl' ]] &&
   [[ -f src/state.py && "$(<src/state.py)" == $'size = 94' ]] &&
   [[ -f tmp/theme && "$(<tmp/theme)" == $'red' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
