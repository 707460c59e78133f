#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/level && "$(<conf/level)" == $'green' ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'oak' ]] &&
   [[ -f data/queue && "$(<data/queue)" == $'pine' ]] &&
   [[ -f logs/plan.log && "$(<logs/plan.log)" == $'mint\nblue\ngreen' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'mode = 10' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
