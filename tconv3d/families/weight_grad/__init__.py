"""Kernel families that compute weight gradients on tensor cores."""
