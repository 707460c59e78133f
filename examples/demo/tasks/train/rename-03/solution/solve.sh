#!/bin/bash
set -e
cd /app
cat conf/task
mv tmp/index docs/page
