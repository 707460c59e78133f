#!/bin/bash
set -e
cd /app
cat conf/node
mv docs/depth tmp/key
