"""Chains behind transposed convolutions in graphs of torch.fx and of Dynamo: what is found, and what must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tconv3d.tails import chains
from tconv3d.tails.vocabulary import name_of


class Parts(nn.Module):
    """Modules and parameters that forwards use."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.other_up = nn.ConvTranspose3d(2, 4, 2, stride=2)
        self.conv = nn.Conv3d(2, 4, 1)
        self.norm = nn.BatchNorm3d(4)
        self.act = nn.LeakyReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.shortcut = nn.Sequential(nn.ConvTranspose3d(2, 4, 2, stride=2), nn.ReLU(inplace=True))
        self.writing = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Conv3d(2, 4, 1))
        self.scale = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.how = forward


def is_up(node: fx.Node) -> bool:
    if node.op == "call_module":
        return node.target in ("up", "other_up")
    return node.op == "call_function" and "conv_transpose3d" in str(node.target)


def traced(forward: Callable[..., Any], parts: Parts) -> fx.GraphModule:
    """Traces `forward(parts, ...)`, with all modules as leaves."""

    class Root(nn.Module):
        pass

    root = Root()
    for name, value in (*parts.named_children(), *parts.named_parameters(recurse=False)):
        setattr(root, name, value)
    names = list(forward.__code__.co_varnames[1 : forward.__code__.co_argcount])
    graph = fx.Graph()
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda module, name: True  # type: ignore[method-assign]
    source = f"lambda self, {', '.join(names)}: forward(self, {', '.join(names)})"
    Root.forward = eval(source, {"forward": forward})  # type: ignore[attr-defined]
    graph = tracer.trace(root)
    return fx.GraphModule(root, graph)


def found(forward: Callable[..., Any], training: bool = True) -> chains.Found:
    module = traced(forward, Parts(forward).train(training))
    return chains.find(module.graph, is_up, dict(module.named_modules()))


FOUND: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "modules in a row": (lambda m, x: m.act(m.norm(m.up(x))), ["conv -> batch_norm -> leaky_relu"]),
    "functions and operators": (lambda m, x: F.silu(m.up(x) * m.scale + 1), ["conv -> mul -> add -> silu"]),
    "methods": (lambda m, x: m.up(x).relu().mean((2, 3, 4)), ["conv -> relu -> mean"]),
    "a view at the end stays outside": (lambda m, x: m.up(x).mean((2, 3, 4)).flatten(1), ["conv -> mean"]),
    "one use, several branches": (lambda m, x: (lambda z: z * torch.sigmoid(z))(m.up(x)), ["conv -> sigmoid -> mul"]),
    "a residual": (lambda m, x, r: F.relu(m.norm(m.up(x)) + r), ["conv -> batch_norm -> add -> relu"]),
    "a residual that is computed in between": (
        lambda m, x: F.relu(m.up(x) + m.conv(F.interpolate(x, scale_factor=2))),
        ["conv -> add -> relu"],
    ),
    "a shortcut that writes to its own tensors": (lambda m, x: m.up(x) + m.shortcut(x), ["conv -> add"]),
    "up to what a tail cannot hold": (lambda m, x, r: torch.cat([m.norm(m.up(x)), r], 1), ["conv -> batch_norm"]),
    "two convolutions": (
        lambda m, x: F.relu(m.norm(m.up(x)) + torch.tanh(m.other_up(x))),
        ["conv -> batch_norm", "conv -> tanh -> add -> relu"],
    ),
    "in place": (lambda m, x: F.relu(m.up(x), inplace=True).add_(1), ["conv -> relu -> add"]),
    "statements": (lambda m, x: (lambda z: (z.mul_(2), m.norm(z))[1])(m.up(x)), ["conv -> mul -> batch_norm"]),
    "statements at the end": (
        lambda m, x: (lambda z: (m.act(z), z.clamp_(max=1), torch.cat([z, z], 1))[2])(m.up(x) * 2),
        ["conv -> mul -> leaky_relu -> clamp"],
    ),
    "a detached copy": (
        lambda m, x: (lambda z: (lambda y: (z + m.scale) * y + y)(z.clone().detach()))(m.up(x)),
        ["conv -> clone -> add -> mul -> add"],
    ),
    "numbers computed from sizes": (
        lambda m, x: (lambda z, s: z.view(s[0], s[1], -1).softmax(2).view(s[0], s[1] * s[2], s[3], s[4]) * 2)(
            *(lambda z: (z, z.shape))(m.up(x))
        ),
        ["conv -> softmax -> mul"],
    ),
    "a view of another tensor": (lambda m, x, r: (lambda z: z * r.view(z.shape))(m.up(x)), ["conv -> mul"]),
    "two uses of the end": (lambda m, x: (lambda y: (y, m.conv(y[:, :2])))(F.relu(m.up(x))), ["conv -> relu"]),
    "largest channel": (lambda m, x: torch.max(m.up(x), 1)[0] * 2, ["conv -> max -> mul"]),
    "sizes of its own result": (lambda m, x: (lambda z: F.relu(z.view(z.shape)))(m.up(x)), ["conv -> relu"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_chain_is_found_and_computes_the_same(name: str) -> None:
    forward, words = FOUND[name]
    result = found(forward)
    assert [chain.words for chain in result.chains] == words
    parts = Parts(forward)
    x, r = torch.randn(1, 2, 2, 3, 2), torch.randn(1, 4, 4, 6, 4)
    arguments = (x, r)[: forward.__code__.co_argcount - 1]
    expected = forward(parts, *arguments)
    module = traced(forward, parts)
    again = chains.find(module.graph, is_up, dict(module.named_modules())).chains

    def call(chain: chains.Chain) -> Any:
        tail, up = fx.GraphModule(module, chain.tail()), getattr(module, str(chain.convolution.target))
        return lambda x, *passed: tail(up(x), *passed), (chain.convolution.args[0], *chain.passed)

    chains.replace(module.graph, again, call)
    torch.testing.assert_close(run(module, *arguments), expected)


def run(module: fx.GraphModule, *arguments: Tensor) -> Any:
    return fx.Interpreter(module).run(*arguments)


ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda m, x: m.up(x), "nothing follows it"),
    "concatenated": (lambda m, x, r: torch.cat([m.up(x), r], 1), "cat follows it"),
    "its own result is returned too": (lambda m, x: (lambda z: (z, F.relu(z)))(m.up(x)), "used by the caller too"),
    "its result is sliced": (lambda m, x: m.up(x)[:, :2].relu(), "getitem follows it"),
    "dropout in training": (lambda m, x: m.drop(m.up(x)), "dropout follows it"),
    "functional dropout": (lambda m, x: F.dropout(m.up(x), 0.5), "dropout follows it"),
    "a read of its size": (lambda m, x, r: F.interpolate(r, size=m.up(x).shape[2:]), "no single result"),
    "several ends": (lambda m, x: (lambda z: (F.relu(z), z * 2))(m.up(x)), "no single result"),
    "it is added to another tensor in place": (lambda m, x, r: r.add_(m.up(x)), "add follows it"),
    "a view of another tensor is written": (lambda m, x, r: r.view_as(m.up(x)).mul_(2), "no single result"),
    "its input is written in between": (
        lambda m, x, r: (lambda z, y: (F.relu(z + y.sum()), y))(m.up(x), x.mul_(2)),
        "mul_ writes to a tensor",
    ),
    "random numbers": (lambda m, x: F.rrelu(m.up(x), training=True), "rrelu follows it"),
}


@pytest.mark.parametrize("name", ALONE)
def test_no_chain_and_why(name: str) -> None:
    forward, words = ALONE[name]
    result = found(forward)
    reasons = " ".join(result.alone.values())
    assert not result.chains and words in reasons


CUT: dict[str, tuple[Callable[..., Any], str]] = {
    "a module writes to its input in between": (
        lambda m, x: F.relu(torch.tanh(m.up(x)) + m.writing(x)[:, :1, :1, :1, :1]),
        "conv -> tanh",
    ),
    "an operand is written after it was read": (
        lambda m, x, r: (lambda s: (lambda z, y: (z * y, s))(torch.tanh(m.up(x)) + s, s.mul_(2)))(r + 1),
        "conv -> tanh",
    ),
    "an operand is written after the chain": (
        lambda m, x, r: (lambda s: (lambda z, y: (z, y))(torch.tanh(m.up(x)) + s, s.mul_(2)))(r + 1),
        "conv -> tanh",
    ),
    "an operand is written before it is read": (
        lambda m, x, r: (lambda s: (lambda z, y: (z * y, s))(m.up(x), s.mul_(2)))(r + 1),
        "conv -> mul",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_chains_end_where_the_order_of_writes_could_be_seen(name: str) -> None:
    forward, words = CUT[name]
    assert [chain.words for chain in found(forward).chains] == [words]


def test_dropout_in_evaluation_is_held() -> None:
    result = found(lambda m, x: F.relu(m.drop(m.up(x))), training=False)
    assert [chain.words for chain in result.chains] == ["conv -> relu"]


def test_a_norm_that_is_called_in_between_too_ends_the_chain() -> None:
    """Statistics of a shared BatchNorm are updated in the order of its calls."""
    result = found(lambda m, x, r: torch.tanh(m.norm(m.up(x)) + m.norm(r)))
    assert [chain.words for chain in result.chains] == ["conv -> batch_norm"]


def test_a_norm_is_called_once_in_a_chain() -> None:
    result = found(lambda m, x: m.norm(torch.tanh(m.norm(m.up(x)))))
    assert [chain.words for chain in result.chains] == ["conv -> batch_norm -> tanh"]


def test_unknown_functions_in_between_end_the_chain() -> None:
    def helper(x: Tensor) -> Tensor:
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    z = graph.call_module("up", (x,))
    first = graph.call_function(F.relu, (z,))
    other = graph.call_function(helper, (x,))
    second = graph.call_function(torch.add, (first, other))
    graph.output(second)
    (chain,) = chains.find(graph, is_up).chains
    assert chain.nodes == (first,)
    context = graph.find_nodes(op="call_function", target=helper)[0]
    context.target = torch._C._set_grad_enabled  # Dynamo's graphs have such nodes
    assert chains.find(graph, is_up).chains[0].nodes == (first,)


def test_graphs_of_dynamo() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def forward(m: Parts, x: Tensor, r: Tensor) -> Tensor:
        y = m.act(m.norm(m.up(x)) * m.scale)
        y += m.shortcut(x)
        return torch.cat([y, r], 1)

    parts = Parts(forward)
    x, r = torch.randn(1, 2, 2, 3, 2), torch.randn(1, 4, 4, 6, 4)
    torch.compile(lambda x, r: forward(parts, x, r), backend=backend, fullgraph=True)(x, r)
    result = chains.find(graphs[0].graph, is_up, memory=chains.memory_of_example)
    assert [chain.words for chain in result.chains] == [
        "conv -> batch_norm -> mul -> leaky_relu -> add",
        "conv -> relu",
    ]
    assert len(result.chains[0].passed) == 6  # statistics, weights, scale, and the other chain's result


def test_names_of_modules() -> None:
    kinds = {nn.BatchNorm3d: "batch_norm", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu", nn.PReLU: "prelu"}
    kinds |= {
        nn.InstanceNorm3d: "instance_norm",
        nn.GELU: "gelu",
        nn.ReLU: "relu",
        nn.AdaptiveAvgPool3d: "adaptive_avg_pool",
    }
    assert {kind: name_of(kind) for kind in kinds} == kinds
