#!/bin/bash
set -e
cd /app
cat conf/size
rm docs/host
