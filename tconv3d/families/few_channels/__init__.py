"""Kernel family for layers with few input or few output channels per group, on tensor cores."""
