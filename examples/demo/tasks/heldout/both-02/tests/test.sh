#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/rate && "$(<conf/rate)" == $'rain' ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'owl' ]] &&
   [[ -f docs/path && "$(<docs/path)" == $'rain' ]] &&
   [[ -f docs/user && "$(<docs/user)" == $'87' ]] &&
   [[ -f src/title.py && "$(<src/title.py)" == $'state = 15' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
