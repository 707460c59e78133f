#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'fox' ]] &&
   [[ -f docs/limit && "$(<docs/limit)" == $'green' ]] &&
   [[ -f logs/depth.log && "$(<logs/depth.log)" == $'gold\noak\nfox' ]] &&
   [[ -f src/theme.py && "$(<src/theme.py)" == $'plan = 91' ]] &&
   [[ -f tmp/cache && "$(<tmp/cache)" == $'46' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
