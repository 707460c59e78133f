#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/path && "$(<conf/path)" == $'tmp/plan' ]] &&
   [[ -f conf/theme && "$(<conf/theme)" == $'wind' ]] &&
   [[ -f src/task.py && "$(<src/task.py)" == $'port = 42' ]] &&
   [[ -f tmp/port && "$(<tmp/port)" == $'salt' ]] &&
   [[ -f tmp/queue && "$(<tmp/queue)" == $'60' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
