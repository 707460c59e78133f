#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/level && "$(<conf/level)" == $'24' ]] &&
   [[ -f conf/title && "$(<conf/title)" == $'wolf' ]] &&
   [[ -f data/plan && "$(<data/plan)" == $'24' ]] &&
   [[ -f data/port && "$(<data/port)" == $'blue' ]] &&
   [[ -f docs/task && "$(<docs/task)" == $'rain' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
