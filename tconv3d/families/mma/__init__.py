"""Kernel family for forward pass and input gradient on the tensor cores of every GPU since Ampere."""
