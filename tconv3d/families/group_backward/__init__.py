"""The kernel family that computes the gradients of layers with small groups."""
