#!/bin/bash
set -e
cd /app
cat conf/task
echo 22 > data/plan
rm tmp/token
