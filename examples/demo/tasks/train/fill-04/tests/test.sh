#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'wind' ]] &&
   [[ -f data/key && "$(<data/key)" == $'39' ]] &&
   [[ -f data/size && "$(<data/size)" == $'gold' ]] &&
   [[ -f data/state && "$(<data/state)" == $'gold' ]] &&
   [[ -f docs/task && "$(<docs/task)" == $'35' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
