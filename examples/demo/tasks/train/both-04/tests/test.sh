#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/key && "$(<conf/key)" == $'35' ]] &&
   [[ -f data/level && "$(<data/level)" == $'20' ]] &&
   [[ -f data/queue && "$(<data/queue)" == $'iron' ]] &&
   [[ -f docs/list && "$(<docs/list)" == $'iron' ]] &&
   [[ -f tmp/plan && "$(<tmp/plan)" == $'86' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
