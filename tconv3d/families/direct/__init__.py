"""Kernel family for every geometry and element type, by plain multiply-adds."""
