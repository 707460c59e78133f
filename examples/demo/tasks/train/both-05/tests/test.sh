#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/queue && "$(<conf/queue)" == $'78' ]] &&
   [[ -f conf/token && "$(<conf/token)" == $'27' ]] &&
   [[ -f data/title && "$(<data/title)" == $'green' ]] &&
   [[ -f data/user && "$(<data/user)" == $'27' ]] &&
   [[ -f tmp/rate && "$(<tmp/rate)" == $'gold' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
