"""PyTorch's own operator as a family: it makes offers, and has no kernels here."""
