#!/bin/bash
set -e
cd /app
grep -l bear src/*
sed -i s/bear/wolf/ src/level.py
