#!/bin/bash
set -e
cd /app
cat data/size
rm tmp/user
