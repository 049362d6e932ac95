#!/bin/sh
# What one GPU can show, in under six minutes; `--dry` runs the same code on the CPU with tiny sizes, in seconds.
# PYTHON: the interpreter, with torch for the GPU and what pyproject.toml asks for.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
