"""Finds what follows each transposed convolution in a torch.fx graph of PyTorch's Python API.

The graph is one that `torch.fx` traced or that Dynamo hands to a backend: calls of modules, functions, methods and
operators. The chain of a convolution is the largest set of nodes behind it that a tail can hold (`vocabulary`) and of
which only one node, the end, is used elsewhere. Tensors from elsewhere are passed to the tail.

A chain runs as one call where its end was, so the convolution moves behind the nodes in between. Chains are cut so
that nobody can see that: nothing in between writes to what the chain reads, and nothing in between has effects that
are unknown. Random numbers are never part of a chain. This module knows graphs and the names of PyTorch's API; it
knows nothing of shapes, kernels or who runs a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

from torch import Tensor, fx, nn

from . import vocabulary
from .vocabulary import Kind, Known


@dataclass(frozen=True)
class Chain:
    """Holds a transposed convolution of a graph and the nodes of its tail, in the order of the graph."""

    convolution: fx.Node
    nodes: tuple[fx.Node, ...]  # without the convolution; the last one is the end
    attributes: tuple[fx.Node, ...]  # `get_attr` nodes that the tail uses, perhaps with others
    passed: tuple[fx.Node, ...]  # other nodes whose values the tail takes as arguments after the convolution's result
    between: tuple[fx.Node, ...]  # nodes that are no part of the chain, and that the chain runs behind
    words: str  # for example "conv -> batch_norm -> leaky_relu"

    @property
    def end(self) -> fx.Node:
        """The only node of the chain that is used elsewhere."""
        return self.nodes[-1]

    def beginnings(self, most: int) -> Iterator[Chain]:
        """Yields this chain, and then shorter and shorter ones that it begins with, `most` in all."""
        yield self
        for index in range(len(self.nodes) - 2, -1, -1):
            if most <= 1:
                return
            part = self._until(self.nodes[index])
            if part is not None:
                most -= 1
                yield part

    def _until(self, end: fx.Node) -> Chain | None:
        """Returns the chain that ends with a node of this one, or None if there is none."""
        known = vocabulary.known(end, {})
        if not known.held or known.kind in (Kind.SIZE, Kind.VIEW) or known.returns_tuple or not end.users:
            return None
        inside, waiting = {end}, [end]
        while waiting:
            new = [node for node in waiting.pop().all_input_nodes if node in self.nodes and node not in inside]
            inside.update(new)
            waiting.extend(new)
        inner = [self.convolution, *(inside - {end})]
        if any(user not in inside for node in inner for user in node.users):
            return None
        nodes = tuple(node for node in self.nodes if node in inside)
        read = {each for node in nodes for each in node.all_input_nodes}
        words = " -> ".join(["conv", *(word for node in nodes if (word := vocabulary.known(node, {}).word))])
        return Chain(
            self.convolution,
            nodes,
            tuple(each for each in self.attributes if each in read),
            tuple(each for each in self.passed if each in read),
            self.between,
            words,
        )

    def tail(self, pass_attributes: bool = False) -> fx.Graph:
        """Returns the tail as a graph of its own: placeholders for the convolution's result and for `passed`.

        Modules and attributes have the names that they have in the graph of the chain. With `pass_attributes` the
        attributes are placeholders too, behind the others.
        """
        graph = fx.Graph()
        copies = {self.convolution: graph.placeholder("z")}
        given = (*self.passed, *self.attributes) if pass_attributes else self.passed
        for index, node in enumerate(given):
            copies[node] = graph.placeholder(f"passed_{index}")
        for node in (*self.attributes, *self.nodes):
            if node not in copies:
                copies[node] = graph.node_copy(node, lambda each: copies[each])
        graph.output(copies[self.end])
        return graph


@dataclass(frozen=True)
class Found:
    """Holds the chains of a graph, and for every other transposed convolution why it has none."""

    chains: tuple[Chain, ...]
    alone: Mapping[fx.Node, str]


Modules = Mapping[str, nn.Module]


Memory = Callable[[fx.Node], object]


def find(
    graph: fx.Graph,
    is_convolution: Callable[[fx.Node], bool],
    modules: Modules | None = None,
    memory: Memory = lambda node: None,
    training: bool | None = None,
) -> Found:
    """Returns the chains of all transposed convolutions of a graph, none of which share a node.

    `is_convolution` tells which nodes are convolutions whose tail can be fused; their result must be a new tensor.
    `modules` are the modules that `call_module` nodes name. `memory` returns an object for a tensor from outside of
    the graph, so that tensors with different objects share no memory, or None if nothing is known of it. `training`
    is the mode of all modules, or None if each is in its own.
    """
    convolutions = [node for node in graph.nodes if is_convolution(node)]
    _use_results(graph, modules or {}, training)
    known = {node: vocabulary.known(node, modules or {}, training) for node in graph.nodes}
    known.update(dict.fromkeys(convolutions, Known(Kind.FRESH, word="conv_transpose3d")))
    _hold_gates(graph, modules or {}, known)
    search = _Search(graph, known, memory)
    chains: list[Chain] = []
    alone: dict[fx.Node, str] = {}
    # From the last convolution to the first: an operator with the results of two convolutions belongs to the later
    # one, which then has fewer nodes in between.
    for node in reversed(convolutions):
        found = search.chain(node)
        if isinstance(found, str):
            alone[node] = found
        else:
            chains.append(found)
            search.taken.update(found.nodes)
    return Found(tuple(reversed(chains)), alone)


def _hold_gates(graph: fx.Graph, modules: Modules, known: dict[fx.Node, Known]) -> None:
    """Lets tails hold linear layers and convolutions of numbers per channel, as in squeeze-and-excitation blocks."""
    behind: dict[fx.Node, bool] = {}  # nodes with such numbers, and whether they are behind a layer
    for node in graph.nodes:
        inputs = [each for each in node.all_input_nodes if known[each].kind not in (Kind.SOURCE, Kind.SIZE)]
        if known[node].held and vocabulary.squeezes(node, modules):
            behind[node] = False
        elif inputs and all(each in behind for each in inputs):
            layer = vocabulary.mixes(node, modules)
            if known[node].held or layer:
                behind[node] = layer or any(behind[each] for each in inputs)
                known[node] = replace_fields(known[node], held=True, inner=behind[node])


def _use_results(graph: fx.Graph, modules: Modules, training: bool | None) -> None:
    """Replaces tensors, behind statements that write to them, by the results of these statements."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        known = vocabulary.known(node, modules, training)
        if known.held and known.writes is not None and node.target not in vocabulary.IN_PLACE_OPERATORS:
            later = {user for user in known.writes.users if order[user] > order[node]}
            known.writes.replace_all_uses_with(node, delete_user_cb=later.__contains__)


def memory_of_example(node: fx.Node) -> object:
    """Returns what `find` takes as `memory` in a graph of Dynamo, whose placeholders carry examples."""
    example = node.meta.get("example_value", node.meta.get("val"))
    return example.untyped_storage()._cdata if isinstance(example, Tensor) else None


def replace(
    graph: fx.Graph, chains: Sequence[Chain], call: Callable[[Chain], tuple[Callable[..., Any], Any]]
) -> None:
    """Replaces chains of a graph, in place, by calls of functions.

    `call` returns for each chain the function and its arguments, which may name nodes of the graph. It is asked
    before the graph changes.
    """
    calls = [call(chain) for chain in chains]
    replaced: dict[fx.Node, fx.Node] = {}
    for chain, (function, arguments) in zip(chains, calls, strict=True):
        with graph.inserting_before(chain.end):
            current = fx.node.map_arg(arguments, lambda node: replaced.get(node, node))
            replaced[chain.end] = graph.call_function(function, tuple(current))
        chain.end.replace_all_uses_with(replaced[chain.end])
        for node in (*reversed(chain.nodes), chain.convolution):
            graph.erase_node(node)


class _Search:
    """Looks for chains in one graph."""

    def __init__(self, graph: fx.Graph, known: Mapping[fx.Node, Known], memory: Memory) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.nodes = list(graph.nodes)
        self.known = known
        self.taken: set[fx.Node] = set()
        self._bases: dict[fx.Node, frozenset[fx.Node]] = {}
        self.separate = {node for node in self.nodes if self.known[node].kind is Kind.FRESH}
        owners: dict[object, fx.Node] = {}  # the first node of every memory
        for node in self.nodes:
            found = memory(node) if self.known[node].kind is Kind.SOURCE else None
            if found is not None:
                self._bases[node] = frozenset({owners.setdefault(found, node)})
                self.separate.add(node)

    def chain(self, convolution: fx.Node) -> Chain | str:
        """Returns the chain of a convolution, or why it has none."""
        region = self._region(convolution)
        why = self._why_short(convolution, region)
        for end in reversed(region):
            if not self._can_end(end):
                continue
            inside = self._closed(convolution, end, region)
            if inside is None:
                continue
            seen = self._why_seen(convolution, end, inside)
            if seen is not None:
                why = seen
                continue
            nodes = tuple(node for node in region if node in inside)
            outside = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
            attributes = tuple(each for each in outside if each.op == "get_attr")
            passed = tuple(each for each in outside if each.op != "get_attr")
            between = self.nodes[self.order[convolution] + 1 : self.order[end]]
            rest = tuple(node for node in between if node not in inside and node.op != "get_attr")
            words = " -> ".join(["conv", *(word for node in nodes if (word := self.known[node].word))])
            return Chain(convolution, nodes, attributes, passed, rest, words)
        return why

    def _region(self, convolution: fx.Node) -> list[fx.Node]:
        """Returns the nodes that a tail can hold and that depend on nothing else behind the convolution, in order."""
        after, region = {convolution}, {convolution: None}
        for node in self.nodes[self.order[convolution] + 1 :]:
            behind = [each for each in node.all_input_nodes if each in after]
            if not behind:
                continue
            after.add(node)
            if node in self.taken or not self.known[node].held or any(each not in region for each in behind):
                continue
            written = self.known[node].writes
            if written is not None and not self._bases_of(written) <= region.keys():
                continue  # it writes to a tensor from elsewhere
            region[node] = None
        return list(region)[1:]

    def _can_end(self, node: fx.Node) -> bool:
        """Tells whether a chain may end with a node: it computes a tensor that is no view of another one."""
        known = self.known[node]
        if known.kind is Kind.SIZE or known.returns_tuple or known.inner:
            return False
        if known.kind is Kind.IN_PLACE and not node.users:
            return False  # a statement, after which its operand is used
        return known.kind is not Kind.VIEW or self.known[node.all_input_nodes[0]].returns_tuple

    def _closed(self, convolution: fx.Node, end: fx.Node, region: list[fx.Node]) -> set[fx.Node] | None:
        """Returns the convolution and all nodes that must go with `end`, or None if one of them is used elsewhere."""
        members, inside = {convolution, *region}, {end}
        waiting = [end]
        while waiting:
            while waiting:
                for each in waiting.pop().all_input_nodes:
                    if each in members and each not in inside:
                        inside.add(each)
                        waiting.append(each)
            for node in region:  # statements, such as `z.add_(1)`, whose results nobody uses
                ends_here = (
                    node not in inside and self.order[node] < self.order[end] and inside.issuperset(node.users)
                )
                if ends_here and not inside.isdisjoint(node.all_input_nodes):
                    inside.add(node)
                    waiting.append(node)
        if convolution not in inside or any(not inside.issuperset(node.users) for node in inside - {end}):
            return None
        return inside

    # ---- what lies between the convolution and the end

    def _why_seen(self, convolution: fx.Node, end: fx.Node, inside: set[fx.Node]) -> str | None:
        """Returns why somebody could see that the chain runs where its end is, or None if nobody can."""
        states = [state for node in inside for state in self.known[node].states]
        stateful = set(states)
        if len(stateful) < len(states):
            return "a norm is called twice"
        paths = tuple(f"{node.target}." for node in inside if node.op == "call_module" and self.known[node].states)
        for node in (*inside, *self.nodes[self.order[convolution] + 1 : self.order[end]]):
            attributes = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
            if any(attribute.startswith(paths) for attribute in attributes):
                return f"{node.name} reads a tensor of a norm in the chain"
        first, last = self.order[convolution], self.order[end]
        for node in self.nodes[first + 1 : last]:
            if node in inside:
                continue
            known = self.known[node]
            if known.kind is Kind.UNKNOWN:
                return f"what {node.name} does between the convolution and {end.name} is not known"
            if not stateful.isdisjoint(known.states) or not stateful.isdisjoint(node.all_input_nodes):
                return f"{node.name} shares statistics with the chain, in between"
            if known.writes is None:
                continue
            written = self._bases_of(known.writes)
            read = [each for each in inside if self.order[each] < self.order[node]]
            sources = {each for one in read for each in one.all_input_nodes if each not in inside}
            bases = {base for each in sources for base in self._bases_of(each)}
            from_outside = any(self.known[base].kind is Kind.SOURCE for base in written)
            known_memory = written <= self.separate and (bases <= self.separate or not from_outside)
            if not known_memory or not written.isdisjoint(bases):
                return f"{node.name} writes to a tensor between the convolution and {end.name}"
        return self._why_written_later(end, inside)

    def _why_written_later(self, end: fx.Node, inside: set[fx.Node]) -> str | None:
        """Returns what writes to an operand of the chain after the chain, or None if nothing does.

        Autograd saves operands of a fused chain that it would not save for a sum, for example.
        """
        tail = [node for node in inside if self.known[node].held]
        sources = {each for node in tail for each in node.all_input_nodes if each not in inside}
        bases = {base for each in sources for base in self._bases_of(each)}
        for node in self.nodes[self.order[end] + 1 :] if bases else ():
            written = self.known[node].writes
            if written is not None and not self._bases_of(written).isdisjoint(bases):
                return f"{node.name} writes later to a tensor that the chain reads"
        return None

    def _bases_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """Returns the nodes whose memory a node's result may be: itself, if the result is always a new tensor."""
        found = self._bases.get(node)
        if found is None:
            known = self.known[node]
            inputs = () if known.kind is Kind.FRESH else node.all_input_nodes
            if known.kind is Kind.IN_PLACE and known.writes is not None:
                inputs = [known.writes]
            # What is unknown may also return a tensor that it keeps.
            own = frozenset({node} if not inputs or known.kind is Kind.UNKNOWN else ())
            found = own.union(*map(self._bases_of, inputs))
            self._bases[node] = found
        return found

    def _why_short(self, convolution: fx.Node, region: list[fx.Node]) -> str:
        """Returns why a convolution without a chain has none, as far as the nodes behind it tell."""
        users = [user for user in convolution.users if user not in region]
        if not convolution.users or all(user.op == "output" for user in convolution.users):
            return "nothing follows it"
        if region and users:
            return f"its own result is used by {', '.join(sorted(map(self._called, users)))} too"
        if region:
            return "no single result of what follows it stands for the rest"
        return f"{', '.join(sorted(map(self._called, users)))} follows it, which a tail cannot hold"

    def _called(self, node: fx.Node) -> str:
        return "the caller" if node.op == "output" else self.known[node].word or node.name
