#!/bin/bash
set -e
cd /app
cat data/rate
mv tmp/title docs/cache
