#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'tmp/depth' ]] &&
   [[ -f docs/cache && "$(<docs/cache)" == $'zinc' ]] &&
   [[ -f docs/level && "$(<docs/level)" == $'owl' ]] &&
   [[ -f src/mode.py && "$(<src/mode.py)" == $'page = 23' ]] &&
   [[ -f tmp/depth && "$(<tmp/depth)" == $'blue' ]] &&
   [[ -f tmp/page && "$(<tmp/page)" == $'mint' ]] &&
   [[ -f tmp/task && "$(<tmp/task)" == $'43' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
