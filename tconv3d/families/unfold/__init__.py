"""The backward pass of wide layers on small volumes, as two plain matrix products."""
