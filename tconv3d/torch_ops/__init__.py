"""Holds PyTorch's side of a call: operators with autograd, argument checks, the executor, packed weights."""
