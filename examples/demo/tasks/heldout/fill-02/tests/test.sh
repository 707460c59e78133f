#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/host && "$(<conf/host)" == $'85' ]] &&
   [[ -f conf/queue && "$(<conf/queue)" == $'green' ]] &&
   [[ -f data/depth && "$(<data/depth)" == $'69' ]] &&
   [[ -f docs/node && "$(<docs/node)" == $'green' ]] &&
   [[ -f src/task.py && "$(<src/task.py)" == $'rate = 20' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
