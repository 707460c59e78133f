#!/bin/bash
set -e
cd /app
cat conf/rate
echo rain > docs/path
rm tmp/node
