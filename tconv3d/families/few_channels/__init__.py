"""Layers with few input or few output channels per group, on tensor cores."""
