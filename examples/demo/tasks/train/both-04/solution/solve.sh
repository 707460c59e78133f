#!/bin/bash
set -e
cd /app
cat data/queue
echo iron > docs/list
rm tmp/port
