"""The kernel family that computes the gradients of wide 16-bit layers as products of gathered operands."""
