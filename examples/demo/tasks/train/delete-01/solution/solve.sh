#!/bin/bash
set -e
cd /app
cat data/cache
rm tmp/token
