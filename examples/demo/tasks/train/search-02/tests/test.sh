#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 6 ]] &&
   [[ -f data/task && "$(<data/task)" == $'29' ]] &&
   [[ -f docs/port && "$(<docs/port)" == $'blue' ]] &&
   [[ -f src/cache.py && "$(<src/cache.py)" == $'page = "green"' ]] &&
   [[ -f src/host.py && "$(<src/host.py)" == $'token = "salt"' ]] &&
   [[ -f src/page.py && "$(<src/page.py)" == $'node = "wind"' ]] &&
   [[ -f src/queue.py && "$(<src/queue.py)" == $'theme = 76' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
