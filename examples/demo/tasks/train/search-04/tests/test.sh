#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f data/plan && "$(<data/plan)" == $'wolf' ]] &&
   [[ -f docs/title && "$(<docs/title)" == $'12' ]] &&
   [[ -f src/key.py && "$(<src/key.py)" == $'size = 91' ]] &&
   [[ -f src/note.py && "$(<src/note.py)" == $'cache = "fox"' ]] &&
   [[ -f src/port.py && "$(<src/port.py)" == $'state = "blue"' ]] &&
   [[ -f src/rate.py && "$(<src/rate.py)" == $'list = "zinc"' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
