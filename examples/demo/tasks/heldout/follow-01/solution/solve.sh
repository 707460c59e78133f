#!/bin/bash
set -e
cd /app
cat conf/node
cat docs/cache
echo 96 > docs/title
