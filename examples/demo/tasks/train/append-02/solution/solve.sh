#!/bin/bash
set -e
cd /app
cat conf/list
echo fox >> logs/depth.log
