"""Kernel families, one folder each: the planner, its model of time, and the CUDA kernels."""
