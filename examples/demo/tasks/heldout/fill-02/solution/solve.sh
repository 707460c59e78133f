#!/bin/bash
set -e
cd /app
cat conf/queue
echo green > docs/node
