#!/bin/bash
set -e
cd /app
grep -l red src/*
sed -i s/red/fox/ src/token.py
