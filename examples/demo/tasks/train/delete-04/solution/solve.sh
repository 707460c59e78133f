#!/bin/bash
set -e
cd /app
cat conf/theme
rm tmp/cache
