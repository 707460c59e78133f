#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'docs/level' ]] &&
   [[ -f data/limit && "$(<data/limit)" == $'20' ]] &&
   [[ -f docs/key && "$(<docs/key)" == $'zinc' ]] &&
   [[ -f docs/level && "$(<docs/level)" == $'zinc' ]] &&
   [[ -f src/title.py && "$(<src/title.py)" == $'queue = 54' ]] &&
   [[ -f tmp/theme && "$(<tmp/theme)" == $'78' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
