#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f data/key && "$(<data/key)" == $'65' ]] &&
   [[ -f data/size && "$(<data/size)" == $'39' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'83' ]] &&
   [[ -f src/node.py && "$(<src/node.py)" == $'port = 28' ]] &&
   [[ -f src/queue.py && "$(<src/queue.py)" == $'title = 84\nlist = 39' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
