#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/note && "$(<conf/note)" == $'oak' ]] &&
   [[ -f data/key && "$(<data/key)" == $'45' ]] &&
   [[ -f data/size && "$(<data/size)" == $'wolf' ]] &&
   [[ -f logs/page.log && "$(<logs/page.log)" == $'wind\nmint\n45' ]] &&
   [[ -f tmp/level && "$(<tmp/level)" == $'55' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
