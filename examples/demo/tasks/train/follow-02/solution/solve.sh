#!/bin/bash
set -e
cd /app
cat conf/level
cat docs/state
echo red > data/limit
