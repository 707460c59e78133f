#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/note && "$(<conf/note)" == $'56' ]] &&
   [[ -f src/cache.py && "$(<src/cache.py)" == $'port = "iron"' ]] &&
   [[ -f src/limit.py && "$(<src/limit.py)" == $'key = "bear"' ]] &&
   [[ -f src/mode.py && "$(<src/mode.py)" == $'limit = "green"' ]] &&
   [[ -f src/theme.py && "$(<src/theme.py)" == $'node = 31' ]] &&
   [[ -f tmp/token && "$(<tmp/token)" == $'47' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
