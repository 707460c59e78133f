#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 5 ]] &&
   [[ -f conf/queue && "$(<conf/queue)" == $'15' ]] &&
   [[ -f conf/theme && "$(<conf/theme)" == $'zinc' ]] &&
   [[ -f docs/limit && "$(<docs/limit)" == $'80' ]] &&
   [[ -f logs/index.log && "$(<logs/index.log)" == $'owl\nblue\nzinc' ]] &&
   [[ -f tmp/plan && "$(<tmp/plan)" == $'10' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
