#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/host && "$(<conf/host)" == $'gold' ]] &&
   [[ -f data/cache && "$(<data/cache)" == $'tmp/token' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'rain' ]] &&
   [[ -f docs/state && "$(<docs/state)" == $'red' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'index = 81' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
