"""ReLU and GroupNorm behind a convolution: statistics, normalization and their gradients."""
