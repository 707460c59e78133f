#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/rate && "$(<conf/rate)" == $'13' ]] &&
   [[ -f conf/theme && "$(<conf/theme)" == $'47' ]] &&
   [[ -f data/path && "$(<data/path)" == $'wind' ]] &&
   [[ -f docs/mode && "$(<docs/mode)" == $'47' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'queue = 83' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
