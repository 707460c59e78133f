#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'oak' ]] &&
   [[ -f conf/path && "$(<conf/path)" == $'26' ]] &&
   [[ -f data/cache && "$(<data/cache)" == $'26' ]] &&
   [[ -f data/host && "$(<data/host)" == $'green' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'port = 80' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
