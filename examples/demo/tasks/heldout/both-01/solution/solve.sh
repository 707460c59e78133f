#!/bin/bash
set -e
cd /app
cat data/host
echo 33 > docs/list
rm tmp/note
