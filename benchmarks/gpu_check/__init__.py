"""One prepared check of everything that needs a GPU: `python -m benchmarks.gpu_check`."""
