"""Kernel family for depthwise layers: threads hold all weights of a channel in registers."""
