#!/bin/bash
set -e
cd /app
cat data/list
sed -i s/10/33/ src/page.py
