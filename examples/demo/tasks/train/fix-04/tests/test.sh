#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/rate && "$(<conf/rate)" == $'green' ]] &&
   [[ -f data/host && "$(<data/host)" == $'zinc' ]] &&
   [[ -f data/list && "$(<data/list)" == $'33' ]] &&
   [[ -f docs/token && "$(<docs/token)" == $'37' ]] &&
   [[ -f src/page.py && "$(<src/page.py)" == $'note = 33\nkey = 55' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
