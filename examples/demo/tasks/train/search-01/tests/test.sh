#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/token && "$(<conf/token)" == $'green' ]] &&
   [[ -f docs/node && "$(<docs/node)" == $'zinc' ]] &&
   [[ -f src/depth.py && "$(<src/depth.py)" == $'mode = "iron"' ]] &&
   [[ -f src/queue.py && "$(<src/queue.py)" == $'task = 31' ]] &&
   [[ -f src/size.py && "$(<src/size.py)" == $'port = "blue"' ]] &&
   [[ -f src/state.py && "$(<src/state.py)" == $'state = "gold"' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
