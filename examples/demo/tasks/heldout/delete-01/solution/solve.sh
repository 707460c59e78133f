#!/bin/bash
set -e
cd /app
cat conf/list
rm docs/page
