"""`tconv3d bench | verify | report`: the library beside PyTorch's operator, measured, checked and drawn.

Uses the library from outside, as a user's program does; nothing of the library imports this.
"""
