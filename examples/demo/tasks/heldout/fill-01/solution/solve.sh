#!/bin/bash
set -e
cd /app
cat data/list
echo bear > docs/cache
