#!/bin/bash
set -e
cd /app
cat conf/index
echo rain > data/state
rm tmp/title
