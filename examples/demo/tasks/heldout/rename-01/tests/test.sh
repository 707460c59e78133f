#!/bin/bash
cd /app || exit 1
shopt -s nullglob
found=(*/*)
reward=0
if [[ ${#found[@]} -eq 7 ]] &&
   [[ -f conf/list && "$(<conf/list)" == $'docs/title' ]] &&
   [[ -f data/rate && "$(<data/rate)" == $'58' ]] &&
   [[ -f docs/index && "$(<docs/index)" == $'29' ]] &&
   [[ -f docs/port && "$(<docs/port)" == $'pine' ]] &&
   [[ -f docs/title && "$(<docs/title)" == $'fox' ]] &&
   [[ -f tmp/level && "$(<tmp/level)" == $'oak' ]] &&
   [[ -f tmp/size && "$(<tmp/size)" == $'zinc' ]]; then
  reward=1
fi
[[ -d /logs/verifier ]] || mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
