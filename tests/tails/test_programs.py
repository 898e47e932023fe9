"""Tails as text: what is written is read again, and what has no text is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tconv3d.tails import programs


def graph_of(function: object) -> fx.Graph:
    return fx.symbolic_trace(function).graph  # type: ignore[arg-type]


def test_a_tail_is_read_as_it_was_written() -> None:
    def tail(z: Tensor, r: Tensor, n: int) -> Tensor:
        y = F.silu(z[:, :, None][..., 0].to(torch.float64)).clamp(min=-math.inf, max=2.5) + r.view(n, -1, 1, 1, 1)
        return torch.where(y > 0, y, F.leaky_relu(y, negative_slope=0.1)).mean((2, 3), keepdim=True).add(1, alpha=2)

    text = programs.write(graph_of(tail), ("tensor", "int"), frozenset({0}), (), torch.bfloat16)
    program = programs.read(text)
    assert (program.kinds, program.steady, program.written) == (("tensor", "int"), frozenset({0}), ())
    assert program.autocast is torch.bfloat16
    z, r = torch.randn(2, 3, 1, 4, 5, 6)[:, :, 0], torch.randn(2, 3)
    z = torch.randn(2, 3, 4, 5, 6)
    arguments = program.arguments([r], [2])
    torch.testing.assert_close(program.graph(z, *arguments), tail(z, r, 2))
    assert programs.write(program.graph.graph, ("tensor", "int"), frozenset({0}), (), torch.bfloat16) == text


def test_a_function_without_a_name_has_no_text() -> None:
    graph = fx.Graph()
    z = graph.placeholder("z")
    graph.output(graph.call_function(lambda x: x, (z,)))
    with pytest.raises(programs.CannotWrite, match="has no text"):
        programs.write(graph, (), frozenset(), (), None)


def test_a_constant_that_is_an_object_has_no_text() -> None:
    graph = fx.Graph()
    z = graph.placeholder("z")
    graph.output(graph.call_function(torch.add, (z, torch.device("cpu"))))
    with pytest.raises(programs.CannotWrite, match="a constant of type device"):
        programs.write(graph, (), frozenset(), (), None)
