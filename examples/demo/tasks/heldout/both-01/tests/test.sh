#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/host && "$(<data/host)" == $'33' ]] &&
   [[ -f data/title && "$(<data/title)" == $'43' ]] &&
   [[ -f docs/list && "$(<docs/list)" == $'33' ]] &&
   [[ -f docs/node && "$(<docs/node)" == $'19' ]] &&
   [[ -f src/cache.py && "$(<src/cache.py)" == $'rate = 72' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
