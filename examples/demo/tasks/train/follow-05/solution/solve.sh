#!/bin/bash
set -e
cd /app
cat conf/node
cat docs/level
echo zinc > docs/key
