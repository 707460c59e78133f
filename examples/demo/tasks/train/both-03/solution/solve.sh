#!/bin/bash
set -e
cd /app
cat conf/theme
echo 47 > docs/mode
rm tmp/page
