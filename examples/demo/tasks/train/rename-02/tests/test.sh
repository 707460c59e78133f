#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f data/rate && "$(<data/rate)" == $'docs/cache' ]] &&
   [[ -f data/size && "$(<data/size)" == $'blue' ]] &&
   [[ -f docs/cache && "$(<docs/cache)" == $'owl' ]] &&
   [[ -f docs/node && "$(<docs/node)" == $'salt' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'67' ]] &&
   [[ -f tmp/depth && "$(<tmp/depth)" == $'iron' ]] &&
   [[ -f tmp/task && "$(<tmp/task)" == $'56' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
