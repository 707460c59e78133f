#!/bin/bash
set -e
cd /app
cat conf/path
rm tmp/plan
