"""`parallelize`: a model's step on a split volume is the step of one process; what cannot be split is named."""

from __future__ import annotations

import pytest
import split_models
import torch
from process_groups import Group
from torch import nn

from tconv3d import distributed


@pytest.mark.parametrize(
    ("norm", "size", "shards", "dims", "backend"),
    [
        ("group", (16, 8, 8), (2,), ("depth",), "emulator"),
        ("batch", (24, 8, 8), (3,), (2,), "accelerated"),
        ("instance", (16, 16, 8), (2, 2), (2, 3), "auto"),
        ("cumulative batch", (8, 16, 16), (2, 2), ("height", "width"), "accelerated"),
        ("group", (32, 8, 8), (4,), (2,), "auto"),
    ],
)
def test_a_step_of_a_split_decoder_is_that_of_one_process(
    four_ranks: Group,
    norm: str,
    size: tuple[int, ...],
    shards: tuple[int, ...],
    dims: tuple[object, ...],
    backend: str,
) -> None:
    model = split_models.made(norm, seed=0)
    expected = split_models.one_step(model, split_models.volume(size))
    by_rank = [found for found in four_ranks.run(split_models.split_step, norm, size, shards, dims, backend) if found]
    assert len(by_rank) == torch.Size(shards).numel()
    for rank, found in enumerate(by_rank):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, where=f"rank {rank}, {name}": f"{where}: {m}"
            )


@pytest.mark.parametrize("name", split_models.OPERATORS)
def test_an_operator_of_pytorch_on_a_split_volume_is_that_of_one_process(four_ranks: Group, name: str) -> None:
    """Even and uneven shards, shards without outputs, one and two split dimensions."""
    theirs = split_models.operator_steps(name, torch.nn.functional if "instance" not in name else _Instances)
    refused = 0
    for ours in four_ranks.run(split_models.split_operator_steps, name):
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one[0], str):
                assert "is too small for" in one[0] and "the least" in one[0]
                refused += 1
                continue
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert refused <= 3 * 4


class _Instances:
    """`torch.nn.functional.instance_norm` with the arguments of ours."""

    @staticmethod
    def instance_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.instance_norm(input, None, None, weight, bias)


def test_fused_blocks_and_accelerated_models_can_be_split_and_hooks_stay(four_ranks: Group) -> None:
    for found in four_ranks.run(split_models.other_models):
        assert all(found.values()), found
        assert len(found) == 6


class Scaled(nn.Conv3d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_layers_that_cannot_be_split_are_named_before_anything_changes() -> None:
    model = nn.Sequential(
        nn.Conv3d(1, 1, 3),
        nn.Upsample(scale_factor=2),
        Scaled(1, 1, 1),
        OwnParameter(),
        nn.Conv3d(1, 1, 3, padding=1, padding_mode="circular"),
        nn.Dropout(0.5),
        nn.Dropout3d(0.0),
        nn.Softmax(2),
        nn.MaxPool3d(2, return_indices=True),
        nn.InstanceNorm3d(1, track_running_stats=True),
    )
    found = distributed.plan_split(model)
    assert [layer.place for layer in found.split] == ["0"]
    assert [layer.place for layer in found.left] == ["1", "2", "3", "4", "5", "7", "8", "9"]
    text = str(found)
    for words in (
        "1: Upsample: nothing is known",
        "2: Scaled: it is a subclass of Conv3d",
        "3: OwnParameter: it has parameters of its own",
        "padding_mode='circular'",
        "draw their own masks",
        "over dimension 2",
        "return_indices=True",
        "track_running_stats=True",
    ):
        assert words in text
    with pytest.raises(distributed.CannotSplit, match=r"cannot be split in space:\n  1: Upsample"):
        distributed.parallelize(model, _mesh_of_one(), 2)
    assert type(model[0]) is nn.Conv3d and not model._forward_pre_hooks


@pytest.mark.parametrize("dim", [1, "channels", (2, 3), (), -1])
def test_dimensions_that_are_not_of_the_volume_are_refused(dim: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        distributed.parallelize(nn.Conv3d(1, 1, 1), _mesh_of_one(), dim)  # type: ignore[arg-type]


class _mesh_of_one:
    """Stands for a mesh where nothing but its number of dimensions is asked for."""

    ndim = 1
