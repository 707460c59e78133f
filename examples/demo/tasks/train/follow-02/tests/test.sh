#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/level && "$(<conf/level)" == $'docs/state' ]] &&
   [[ -f data/host && "$(<data/host)" == $'mint' ]] &&
   [[ -f data/limit && "$(<data/limit)" == $'red' ]] &&
   [[ -f docs/state && "$(<docs/state)" == $'red' ]] &&
   [[ -f docs/user && "$(<docs/user)" == $'54' ]] &&
   [[ -f src/rate.py && "$(<src/rate.py)" == $'path = 44' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
