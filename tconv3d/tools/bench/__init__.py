"""Implements `tconv3d demo | bench | verify | tune | report`: measures, checks and charts the library beside PyTorch.

No module of the library outside `tools/` imports this package.
"""
