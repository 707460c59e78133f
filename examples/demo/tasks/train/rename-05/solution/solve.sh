#!/bin/bash
set -e
cd /app
cat conf/node
mv tmp/index tmp/limit
