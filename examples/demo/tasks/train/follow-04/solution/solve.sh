#!/bin/bash
set -e
cd /app
cat conf/task
cat docs/path
echo bear > docs/theme
