#!/bin/bash
set -e
cd /app
cat data/key
echo blue >> logs/user.log
