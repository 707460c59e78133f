#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/key && "$(<data/key)" == $'blue' ]] &&
   [[ -f data/node && "$(<data/node)" == $'zinc' ]] &&
   [[ -f docs/host && "$(<docs/host)" == $'owl' ]] &&
   [[ -f logs/user.log && "$(<logs/user.log)" == $'red\nmint\nblue' ]] &&
   [[ -f tmp/queue && "$(<tmp/queue)" == $'63' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
