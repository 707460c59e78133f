#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/index && "$(<conf/index)" == $'rain' ]] &&
   [[ -f data/cache && "$(<data/cache)" == $'76' ]] &&
   [[ -f data/state && "$(<data/state)" == $'rain' ]] &&
   [[ -f docs/list && "$(<docs/list)" == $'54' ]] &&
   [[ -f src/level.py && "$(<src/level.py)" == $'rate = 45' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
