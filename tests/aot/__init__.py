"""Triton kernels compiled for GPUs that need not be there; `pytest -m aot`, a process of its own."""
