"""The backward pass of layers with small groups."""
