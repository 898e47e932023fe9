"""Implements `tconv3d bench | verify | tune | report`: measures, checks and charts the library beside PyTorch.

No module of the library outside `tools/` imports this package.
"""
