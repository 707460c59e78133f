#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'docs/host' ]] &&
   [[ -f data/node && "$(<data/node)" == $'91' ]] &&
   [[ -f docs/queue && "$(<docs/queue)" == $'fox' ]] &&
   [[ -f src/index.py && "$(<src/index.py)" == $'index = 87' ]] &&
   [[ -f tmp/level && "$(<tmp/level)" == $'rain' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
