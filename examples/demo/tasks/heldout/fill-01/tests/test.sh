#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/depth && "$(<conf/depth)" == $'52' ]] &&
   [[ -f data/list && "$(<data/list)" == $'bear' ]] &&
   [[ -f data/token && "$(<data/token)" == $'40' ]] &&
   [[ -f docs/cache && "$(<docs/cache)" == $'bear' ]] &&
   [[ -f tmp/path && "$(<tmp/path)" == $'65' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
