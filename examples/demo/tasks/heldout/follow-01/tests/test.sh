#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'docs/cache' ]] &&
   [[ -f docs/cache && "$(<docs/cache)" == $'96' ]] &&
   [[ -f docs/page && "$(<docs/page)" == $'17' ]] &&
   [[ -f docs/title && "$(<docs/title)" == $'96' ]] &&
   [[ -f src/depth.py && "$(<src/depth.py)" == $'depth = 20' ]] &&
   [[ -f tmp/theme && "$(<tmp/theme)" == $'89' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
