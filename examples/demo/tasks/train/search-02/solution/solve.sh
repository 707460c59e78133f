#!/bin/bash
set -e
cd /app
grep -l zinc src/*
sed -i s/zinc/salt/ src/host.py
