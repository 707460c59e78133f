#!/bin/bash
set -e
cd /app
cat data/key
echo 45 >> logs/page.log
