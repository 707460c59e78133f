#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f data/task && "$(<data/task)" == $'37' ]] &&
   [[ -f docs/state && "$(<docs/state)" == $'wind' ]] &&
   [[ -f src/key.py && "$(<src/key.py)" == $'cache = "red"' ]] &&
   [[ -f src/level.py && "$(<src/level.py)" == $'index = "wolf"' ]] &&
   [[ -f src/node.py && "$(<src/node.py)" == $'node = "salt"' ]] &&
   [[ -f src/note.py && "$(<src/note.py)" == $'task = 16' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
