#!/bin/bash
set -e
cd /app
cat conf/theme
echo zinc >> logs/index.log
