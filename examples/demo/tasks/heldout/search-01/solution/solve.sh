#!/bin/bash
set -e
cd /app
grep -l rain src/*
sed -i s/rain/iron/ src/cache.py
