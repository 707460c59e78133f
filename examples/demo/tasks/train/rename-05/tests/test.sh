#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'tmp/limit' ]] &&
   [[ -f conf/title && "$(<conf/title)" == $'98' ]] &&
   [[ -f docs/level && "$(<docs/level)" == $'27' ]] &&
   [[ -f docs/path && "$(<docs/path)" == $'salt' ]] &&
   [[ -f tmp/limit && "$(<tmp/limit)" == $'blue' ]] &&
   [[ -f tmp/list && "$(<tmp/list)" == $'15' ]] &&
   [[ -f tmp/theme && "$(<tmp/theme)" == $'green' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
