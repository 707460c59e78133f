#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/node && "$(<data/node)" == $'73' ]] &&
   [[ -f data/note && "$(<data/note)" == $'17' ]] &&
   [[ -f data/plan && "$(<data/plan)" == $'17' ]] &&
   [[ -f src/host.py && "$(<src/host.py)" == $'index = 24' ]] &&
   [[ -f tmp/port && "$(<tmp/port)" == $'salt' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
