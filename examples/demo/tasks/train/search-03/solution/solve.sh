#!/bin/bash
set -e
cd /app
grep -l rain src/*
sed -i s/rain/oak/ src/port.py
