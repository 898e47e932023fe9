"""The kernel family that computes the gradients of wide layers on small volumes as two plain matrix products."""
