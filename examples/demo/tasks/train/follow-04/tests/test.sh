#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/task && "$(<conf/task)" == $'docs/path' ]] &&
   [[ -f data/rate && "$(<data/rate)" == $'86' ]] &&
   [[ -f docs/path && "$(<docs/path)" == $'bear' ]] &&
   [[ -f docs/theme && "$(<docs/theme)" == $'bear' ]] &&
   [[ -f src/level.py && "$(<src/level.py)" == $'host = 31' ]] &&
   [[ -f tmp/size && "$(<tmp/size)" == $'72' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
