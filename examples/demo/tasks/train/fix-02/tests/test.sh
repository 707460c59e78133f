#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/key && "$(<conf/key)" == $'iron' ]] &&
   [[ -f data/index && "$(<data/index)" == $'red' ]] &&
   [[ -f data/node && "$(<data/node)" == $'52' ]] &&
   [[ -f src/depth.py && "$(<src/depth.py)" == $'size = 66' ]] &&
   [[ -f src/level.py && "$(<src/level.py)" == $'key = 59\nstate = 52' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
