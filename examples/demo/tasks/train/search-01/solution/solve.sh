#!/bin/bash
set -e
cd /app
grep -l wind src/*
sed -i s/wind/gold/ src/state.py
