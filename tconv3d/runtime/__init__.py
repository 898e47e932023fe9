"""Brings a plan to a CUDA stream: compiler, disk cache, launcher, and compiling in the background."""
