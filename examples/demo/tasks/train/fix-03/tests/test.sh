#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/queue && "$(<conf/queue)" == $'67' ]] &&
   [[ -f data/level && "$(<data/level)" == $'96' ]] &&
   [[ -f src/page.py && "$(<src/page.py)" == $'mode = 36' ]] &&
   [[ -f src/user.py && "$(<src/user.py)" == $'plan = 96\nport = 74' ]] &&
   [[ -f tmp/path && "$(<tmp/path)" == $'47' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
