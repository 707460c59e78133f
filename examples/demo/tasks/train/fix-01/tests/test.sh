#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/task && "$(<conf/task)" == $'51' ]] &&
   [[ -f docs/index && "$(<docs/index)" == $'81' ]] &&
   [[ -f src/port.py && "$(<src/port.py)" == $'task = 13' ]] &&
   [[ -f src/user.py && "$(<src/user.py)" == $'task = 51\nrate = 66' ]] &&
   [[ -f tmp/size && "$(<tmp/size)" == $'18' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
