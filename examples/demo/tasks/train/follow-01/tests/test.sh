#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/index && "$(<conf/index)" == $'pine' ]] &&
   [[ -f conf/mode && "$(<conf/mode)" == $'data/cache' ]] &&
   [[ -f data/cache && "$(<data/cache)" == $'owl' ]] &&
   [[ -f data/rate && "$(<data/rate)" == $'28' ]] &&
   [[ -f docs/size && "$(<docs/size)" == $'owl' ]] &&
   [[ -f src/level.py && "$(<src/level.py)" == $'theme = 69' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
