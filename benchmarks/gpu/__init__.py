"""What `python -m benchmarks.gpu_check` measures on one GPU."""
