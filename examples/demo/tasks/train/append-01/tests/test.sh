#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/size && "$(<conf/size)" == $'salt' ]] &&
   [[ -f data/theme && "$(<data/theme)" == $'wind' ]] &&
   [[ -f data/user && "$(<data/user)" == $'70' ]] &&
   [[ -f logs/title.log && "$(<logs/title.log)" == $'blue\nowl\n70' ]] &&
   [[ -f src/depth.py && "$(<src/depth.py)" == $'mode = 20' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
