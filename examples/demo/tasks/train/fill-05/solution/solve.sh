#!/bin/bash
set -e
cd /app
cat conf/path
echo 26 > data/cache
