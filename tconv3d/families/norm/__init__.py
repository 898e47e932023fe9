"""Kernel family for ReLU and GroupNorm after a convolution: statistics, normalization and their gradients."""
