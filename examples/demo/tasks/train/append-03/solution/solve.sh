#!/bin/bash
set -e
cd /app
cat data/page
echo 41 >> logs/list.log
