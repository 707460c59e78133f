#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f data/key && "$(<data/key)" == $'mint' ]] &&
   [[ -f docs/list && "$(<docs/list)" == $'rain' ]] &&
   [[ -f src/cache.py && "$(<src/cache.py)" == $'rate = "wind"' ]] &&
   [[ -f src/depth.py && "$(<src/depth.py)" == $'plan = "pine"' ]] &&
   [[ -f src/token.py && "$(<src/token.py)" == $'level = "fox"' ]] &&
   [[ -f tmp/node && "$(<tmp/node)" == $'10' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
