#!/bin/bash
set -e
cd /app
cat conf/size
mv tmp/host tmp/depth
