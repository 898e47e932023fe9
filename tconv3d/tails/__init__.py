"""What follows a convolution: traced from Python, cut into stages, and run with the convolution's kernels."""
