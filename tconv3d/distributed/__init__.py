"""Layers divided over the ranks of a `DeviceMesh`: volumes split in space, and channels.

docs/distributed.md describes volumes split in space, docs/distributed-training.md everything else.

`import tconv3d` alone does not import this package, because `torch.distributed.tensor` takes long to import.
"""

from . import rules  # noqa: F401  # registers how the operators run on DTensors
from .convolution import conv_transpose3d
from .gathering import avg_pool3d, conv3d, max_pool3d
from .norms import batch_norm, group_norm, instance_norm
from .parallelize import CannotSplit, SplitLayer, SplitReport, parallelize, plan_split, shard
from .shards import ShardTooSmall
from .styles import ColwiseParallel, GroupwiseParallel, RowwiseParallel

__all__ = [
    "CannotSplit",
    "ColwiseParallel",
    "GroupwiseParallel",
    "RowwiseParallel",
    "ShardTooSmall",
    "SplitLayer",
    "SplitReport",
    "avg_pool3d",
    "batch_norm",
    "conv3d",
    "conv_transpose3d",
    "group_norm",
    "instance_norm",
    "max_pool3d",
    "parallelize",
    "plan_split",
    "shard",
]
