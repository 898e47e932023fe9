"""Depthwise layers: threads that keep all weights of a channel in registers."""
