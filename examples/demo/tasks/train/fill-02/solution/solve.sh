#!/bin/bash
set -e
cd /app
cat data/plan
echo 17 > data/note
