#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/task && "$(<conf/task)" == $'22' ]] &&
   [[ -f data/plan && "$(<data/plan)" == $'22' ]] &&
   [[ -f docs/title && "$(<docs/title)" == $'red' ]] &&
   [[ -f src/path.py && "$(<src/path.py)" == $'list = 71' ]] &&
   [[ -f tmp/level && "$(<tmp/level)" == $'wind' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
