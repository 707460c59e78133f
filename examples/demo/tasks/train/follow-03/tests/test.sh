#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'wolf' ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'docs/size' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'gold' ]] &&
   [[ -f docs/size && "$(<docs/size)" == $'gold' ]] &&
   [[ -f src/rate.py && "$(<src/rate.py)" == $'page = 25' ]] &&
   [[ -f tmp/queue && "$(<tmp/queue)" == $'15' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
