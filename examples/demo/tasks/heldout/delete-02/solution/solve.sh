#!/bin/bash
set -e
cd /app
cat data/node
rm tmp/task
