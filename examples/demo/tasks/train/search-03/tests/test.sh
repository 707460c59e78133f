#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f conf/title && "$(<conf/title)" == $'28' ]] &&
   [[ -f data/page && "$(<data/page)" == $'12' ]] &&
   [[ -f src/path.py && "$(<src/path.py)" == $'note = "zinc"' ]] &&
   [[ -f src/port.py && "$(<src/port.py)" == $'node = "oak"' ]] &&
   [[ -f src/task.py && "$(<src/task.py)" == $'title = "wolf"' ]] &&
   [[ -f src/token.py && "$(<src/token.py)" == $'path = 69' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
