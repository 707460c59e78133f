#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'data/cache' ]] &&
   [[ -f conf/page && "$(<conf/page)" == $'green' ]] &&
   [[ -f data/cache && "$(<data/cache)" == $'97' ]] &&
   [[ -f data/index && "$(<data/index)" == $'97' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'title = 68' ]] &&
   [[ -f tmp/node && "$(<tmp/node)" == $'owl' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
