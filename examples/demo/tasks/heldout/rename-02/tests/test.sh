#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/token && "$(<conf/token)" == $'gold' ]] &&
   [[ -f data/mode && "$(<data/mode)" == $'docs/level' ]] &&
   [[ -f docs/level && "$(<docs/level)" == $'fox' ]] &&
   [[ -f docs/path && "$(<docs/path)" == $'pine' ]] &&
   [[ -f src/rate.py && "$(<src/rate.py)" == $'path = 17' ]] &&
   [[ -f tmp/host && "$(<tmp/host)" == $'green' ]] &&
   [[ -f tmp/note && "$(<tmp/note)" == $'blue' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
