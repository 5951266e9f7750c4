"""Triton kernels in Triton's interpreter against their references; `pytest -m interp`, a process of its own."""
