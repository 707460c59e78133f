#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'owl' ]] &&
   [[ -f data/index && "$(<data/index)" == $'34' ]] &&
   [[ -f data/page && "$(<data/page)" == $'41' ]] &&
   [[ -f logs/list.log && "$(<logs/list.log)" == $'blue\noak\n41' ]] &&
   [[ -f tmp/user && "$(<tmp/user)" == $'red' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
