"""The halo family computes the forward pass and the input gradient on Hopper's tensor cores from tiles with halos."""
