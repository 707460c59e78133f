#!/bin/bash
set -e
cd /app
cat conf/level
echo green >> logs/plan.log
