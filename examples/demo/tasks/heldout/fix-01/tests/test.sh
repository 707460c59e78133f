#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/state && "$(<conf/state)" == $'55' ]] &&
   [[ -f docs/limit && "$(<docs/limit)" == $'fox' ]] &&
   [[ -f src/path.py && "$(<src/path.py)" == $'node = 59\npage = 55' ]] &&
   [[ -f src/user.py && "$(<src/user.py)" == $'plan = 76' ]] &&
   [[ -f tmp/port && "$(<tmp/port)" == $'wind' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
