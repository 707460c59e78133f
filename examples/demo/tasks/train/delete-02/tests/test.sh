#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/size && "$(<data/size)" == $'tmp/user' ]] &&
   [[ -f docs/host && "$(<docs/host)" == $'green' ]] &&
   [[ -f docs/key && "$(<docs/key)" == $'98' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'key = 29' ]] &&
   [[ -f tmp/depth && "$(<tmp/depth)" == $'gold' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
