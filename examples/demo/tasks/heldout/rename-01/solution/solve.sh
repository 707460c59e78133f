#!/bin/bash
set -e
cd /app
cat conf/list
mv tmp/cache docs/title
