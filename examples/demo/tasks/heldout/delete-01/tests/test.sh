#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'docs/page' ]] &&
   [[ -f data/mode && "$(<data/mode)" == $'pine' ]] &&
   [[ -f docs/task && "$(<docs/task)" == $'mint' ]] &&
   [[ -f src/plan.py && "$(<src/plan.py)" == $'cache = 64' ]] &&
   [[ -f tmp/rate && "$(<tmp/rate)" == $'oak' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
