"""Forward pass and input gradient on Hopper's tensor cores, from a tile of input with its halo."""
