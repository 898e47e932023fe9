"""Forward pass and input gradient on the tensor cores of every GPU since Ampere."""
