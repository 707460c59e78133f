#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/node && "$(<conf/node)" == $'41' ]] &&
   [[ -f conf/task && "$(<conf/task)" == $'docs/page' ]] &&
   [[ -f data/theme && "$(<data/theme)" == $'rain' ]] &&
   [[ -f docs/page && "$(<docs/page)" == $'mint' ]] &&
   [[ -f docs/plan && "$(<docs/plan)" == $'blue' ]] &&
   [[ -f docs/user && "$(<docs/user)" == $'owl' ]] &&
   [[ -f tmp/mode && "$(<tmp/mode)" == $'bear' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
