#!/bin/bash
set -e
cd /app
cat data/user
echo 70 >> logs/title.log
