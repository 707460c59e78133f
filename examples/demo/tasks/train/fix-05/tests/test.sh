#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/plan && "$(<conf/plan)" == $'16' ]] &&
   [[ -f conf/task && "$(<conf/task)" == $'78' ]] &&
   [[ -f docs/path && "$(<docs/path)" == $'gold' ]] &&
   [[ -f src/queue.py && "$(<src/queue.py)" == $'state = 90' ]] &&
   [[ -f src/token.py && "$(<src/token.py)" == $'rate = 12\nindex = 78' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
