"""Volumes that are split in space over the ranks of a `DeviceMesh`: see docs/distributed.md.

Importing `tconv3d` does not import this package, because `torch.distributed.tensor` takes long to import.
"""

from .convolution import conv_transpose3d
from .shards import ShardTooSmall

__all__ = ["ShardTooSmall", "conv_transpose3d"]
