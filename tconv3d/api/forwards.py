"""Runs the forward of a module with the chains behind its transposed convolutions fused.

A plan is a function that does the same as the forward, with one call for every chain. It is made when a kind of call
is new (`reading`), it holds as long as everything is as it was (`Conditions`, `plain.Layers`), and otherwise another
plan is made, or the forward runs as it is written. This module knows modules and graphs; it changes no module.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from ..runtime.compiler import MissingCompilerError
from ..tails import chains, vocabulary
from ..tails.chains import Chain
from ..tails.tracing import one_at_a_time
from ..torch_ops.backend import current_backend
from . import plain, reading
from .conditions import Conditions, is_constant
from .fuse import FusedTail, state_of
from .modules import ConvTranspose3d, convolve_relu_group_norm
from .plain import BASE, Layers
from .python_code import CannotRead
from .reading import TENSOR

MOST_PLANS = 16  # plans that a module makes; calls of further kinds run the forward as it is written
MANY_SIZES = 16  # input sizes of a convolution that are fused at once; tracing a tail for one takes about 20 ms
MOST_SIZES = 1024  # input sizes that are remembered
# Times that a chain gets other parameters, modes or numbers, after which it is not fused for new ones.
MOST_STATES = 64
# Modules behind convolutions that are looked into on trial; reading a forward takes a few milliseconds.
MOST_OPENED = 16
MOST_INSIDE = 32  # modules inside of one that is looked into, all of which are conditions of every call
_TENSORS = (Tensor, nn.Parameter)
_MISSING: Any = object()
_DECIDING = ("inplace", "p", "return_indices")  # attributes of modules by which chains are found


class FusedChain(FusedTail):
    """Runs a convolution of a forward with what follows it, if its layers are known to be plain."""

    def __init__(self, layer: nn.ConvTranspose3d, chain: Chain, read: reading.Read, owner: nn.Module) -> None:
        parts = {str(node.target): read.modules[str(node.target)] for node in chain.nodes if node.op == "call_module"}
        attributes = [_place(owner, str(node.target)) for node in chain.attributes]
        super().__init__(layer, _Tail(parts, chain, attributes), exact_order=False)
        self.words = chain.words
        self._parts, self._attributes = tuple(dict.fromkeys(parts.values())), attributes
        self._sizes: set[torch.Size] = set()
        self._states: set[Any] = set()
        self._has_kernels = True
        self._norm, self._rest = None, None
        found = _triple(chain, read.modules, layer)
        if found is not None:
            behind = Chain(chain.nodes[1], chain.nodes[2:], chain.attributes, chain.passed, (), "")
            self._norm, self._rest = found, _Tail(parts, behind, attributes)

    def forward(self, input: Tensor, *extra: Any) -> Any:
        """Runs the chain, layer by layer where its kernels can be neither found nor compiled."""
        if self._has_kernels and isinstance(input, Tensor):
            try:
                return super().forward(input, *extra)
            except MissingCompilerError as error:
                self._has_kernels = False
                text = f"tconv3d: {self.words} runs unfused, because its kernels are not there to be loaded: {error}"
                warnings.warn(text, stacklevel=2)
        return self._unfused(input, *extra)

    def _watched(self) -> bool:
        return False  # the plan has looked

    def _why_new(self, input: Tensor, extra: tuple[Any, ...], state: Any) -> str | None:
        """Returns why a call is not fused that would have to be traced. A new size runs unfused until it comes again.

        That is for inference, when many sizes have come: a checkpoint must record the same when a call is repeated.
        """
        # A number that a forward reads out of a tensor is a constant of the trace and of its kernels.
        state = state, *[each for each in extra if type(each) is float]
        if state not in self._states:
            if len(self._states) >= MOST_STATES:
                return "tensors or numbers of the tail are new in every call"
            self._states.add(state)
        if input.shape not in self._sizes and not torch.is_grad_enabled():
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            self._sizes.add(input.shape)
            if len(self._sizes) > MANY_SIZES:
                return "the size is new"
        return None

    def _state(self) -> Any:
        state: list[Any] = [state_of(part) for part in self._parts]
        for place, name in self._attributes:
            tensor = place[name]
            state.append((id(tensor), tensor.dtype, tensor.shape))
        return tuple(state)

    def _unfused(self, input: Tensor, *extra: Any) -> Any:
        if self._norm is None or self._rest is None:
            return super()._unfused(input, *extra)
        return self._rest(convolve_relu_group_norm(self.convolution, self._norm, input), *extra)


class _Tail:
    """Runs the nodes of a chain one by one."""

    def __init__(
        self, parts: Mapping[str, nn.Module], chain: Chain, attributes: Sequence[tuple[Mapping[str, Any], str]]
    ) -> None:
        graph = chain.tail(pass_attributes=True)
        calls: dict[Any, Callable[..., Any]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                node.target, node.op = _named("layer", parts[str(node.target)], calls), "call_function"
        self._code = _function(graph, calls, "<tail>")
        self._attributes = attributes

    def __call__(self, z: Tensor, *passed: Any) -> Any:
        return self._code(None, z, *passed, *(place[name] for place, name in self._attributes))


def _place(owner: nn.Module, target: str) -> tuple[Mapping[str, Any], str]:
    """Returns the dictionary and the key of a tensor of a module, by its name."""
    path, _, name = target.rpartition(".")
    module = owner.get_submodule(path)
    own = module.__dict__
    for place in (own["_parameters"], own["_buffers"]):
        if name in place:
            return place, name
    if name not in own:  # an attribute of the class
        return next(base.__dict__ for base in type(module).__mro__ if name in base.__dict__), name
    return (_Own(owner) if module is owner else own), name


class _Own(Mapping[str, Any]):
    """Holds the attributes of a module and not the module, which holds the plans."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __getitem__(self, name: str) -> Any:
        module = self._module()
        assert module is not None
        return module.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _triple(chain: Chain, modules: Mapping[str, nn.Module], layer: nn.ConvTranspose3d) -> nn.GroupNorm | None:
    """Returns the norm of a chain that begins with a ReLU and a GroupNorm over the convolution's output channels."""
    if not chain.words.startswith("conv -> relu -> group_norm") or len(chain.nodes) < 2:
        return None
    relu, norm = chain.nodes[:2]
    module = modules.get(str(norm.target)) if norm.op == "call_module" else None
    row = list(chain.convolution.users) == [relu] and list(relu.users) == [norm] and norm.all_input_nodes == [relu]
    if not row or not isinstance(module, nn.GroupNorm) or relu.all_input_nodes != [chain.convolution]:
        return None
    return module if module.num_channels == layer.out_channels else None


# ---- plans

Block: TypeAlias = FusedTail | None  # what runs a chain; None stands for the block of ReLU and GroupNorm


class Explored:
    """Holds the chains of a module's forward for one kind of call."""

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        is_up: Callable[[nn.Module], bool],
        training: bool | None = None,
    ) -> None:
        # Modules are looked at before the forward is read: then functions of PyTorch are watched.
        ups = {each for each in module.modules() if is_up(each)}
        answers: dict[nn.Module, bool] = {}
        opened = {each for each in module.modules() if _is_opened(each, ups, answers)}
        self.module, self._ups, self._training = module, ups, training
        self._call = module, function, arguments
        self.read, self.found = self._explored(opened)
        self._open_more(opened)
        modules = self.read.modules
        others = [each for each in modules.values() if isinstance(each, nn.ConvTranspose3d) and each not in ups]
        self.others = [(each, type(each)) for each in others]  # convolutions that are not fused as they are
        # Chains for reports: those of layers that run the forwards of their classes.
        self.chains = [chain for chain in self.found.chains if self.has_own_forwards(chain)]

    def _explored(self, opened: set[nn.Module]) -> tuple[reading.Read, chains.Found]:
        """Returns the graph of the forward in which some modules are opened, and its chains."""
        in_a_row = {each: is_sequence(each) for each in opened}
        read = reading.read(*self._call, in_a_row.get, self._training)
        modules = read.modules

        def is_convolution(node: fx.Node) -> bool:
            found = modules.get(str(node.target)) if node.op == "call_module" else None
            return found in self._ups and len(node.args) == 1 and not node.kwargs

        return read, chains.find(read.graph, is_convolution, modules, training=self._training)

    def _open_more(self, opened: set[nn.Module]) -> None:
        """Looks into modules of the user that follow a chain, as long as the chains become longer by that."""
        length, refused = _length(self.found), set()
        for _ in range(MOST_OPENED):
            following = [each for each in self._following() if each not in refused]
            if not following:
                return
            more = _openable(following[0], self._ups)
            for inside in (more, more & {following[0]}):
                if not inside:
                    break
                try:
                    read, found = self._explored(opened | inside)
                except CannotRead:
                    continue
                if _length(found) > length:
                    length, self.read, self.found = _length(found), read, found
                    opened |= inside
                    break
            refused.add(following[0])

    def _following(self) -> list[nn.Module]:
        """Returns the modules that read the result of a chain, or of a convolution without one."""
        ends = [*(chain.end for chain in self.found.chains), *self.found.alone]
        users = dict.fromkeys(user for end in ends for user in end.users if user.op == "call_module")
        return [self.read.modules[str(user.target)] for user in users]

    def convolution(self, node: fx.Node) -> nn.ConvTranspose3d:
        found = self.read.modules[str(node.target)]
        assert isinstance(found, nn.ConvTranspose3d)
        return found

    def norms(self) -> dict[nn.Module, nn.GroupNorm]:
        """Returns the norms of chains that begin with a ReLU and a GroupNorm, by their convolutions."""
        layers = [(chain, self.convolution(chain.convolution)) for chain in self.chains]
        found = {layer: _triple(chain, self.read.modules, layer) for chain, layer in layers}
        return {layer: norm for layer, norm in found.items() if norm is not None}

    def has_own_forwards(self, chain: Chain) -> bool:
        """Tells whether the layers of a chain run the forwards that the source files of their classes define."""
        layers = self.touched(chain)
        return Layers(layers).as_defined and not any("forward" in layer.__dict__ for layer in layers)

    def touched(self, chain: Chain) -> list[nn.Module]:
        """Returns the modules of a chain, the modules that it runs behind, and those that were opened."""
        nodes = (chain.convolution, *chain.nodes, *chain.between)
        named = [self.read.modules[str(node.target)] for node in nodes if node.op == "call_module"]
        inside = [each for module in named for each in module.modules()]
        opened = [module for module in self.read.opened if module is not self.module]
        return [*inside, *opened]


def _is_opened(module: nn.Module, ups: set[nn.Module], answers: dict[nn.Module, bool]) -> bool:
    """Tells whether a sequence is looked into: it has a convolution out of `ups`, or nothing but parts of a tail.

    `answers` are those that were found before.
    """
    found = answers.get(module)
    if found is None:
        found = False
        if is_sequence(module) and plain.is_plain(module):
            children = list(module.children())
            opened = [_is_opened(child, ups, answers) for child in children]
            found = any(opened) or not ups.isdisjoint(children)
            if children and not found:
                found = all(map(_may_be_held, children))
        answers[module] = found
    return found


def _length(found: chains.Found) -> int:
    """Returns how many nodes are in chains."""
    return sum(1 + len(chain.nodes) for chain in found.chains)


def _openable(module: nn.Module, ups: set[nn.Module]) -> set[nn.Module]:
    """Returns a module of the user and those inside of it that can be looked into; nothing if it cannot be itself."""
    inside = list(module.modules())
    if len(inside) > MOST_INSIDE or not ups.isdisjoint(inside):
        return set()
    found = {each for each in inside if _is_users(each) and plain.is_plain(each)}
    return found if module in found else set()


def _is_users(module: nn.Module) -> bool:
    """Tells whether a module is a sequence, or has a forward that is the user's own code."""
    kind = type(module)
    own = not kind.__module__.startswith("torch.") and not hasattr(kind, BASE)
    return is_sequence(module) or (own and isinstance(kind.forward, types.FunctionType))


def _may_be_held(module: nn.Module) -> bool:
    node = fx.Graph()
    called = node.call_module("part", (node.placeholder("z"),))
    return vocabulary.of_module(called, module, training=False).held


def is_sequence(module: nn.Module) -> bool:
    """Tells whether a module runs its children in a row, as `nn.Sequential` does."""
    return isinstance(module, nn.Sequential) and written_forward(type(module)) is nn.Sequential.forward


def written_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Returns the forward of a class as it is written, without the classes that fusing derives."""
    base = kind.__dict__.get(BASE) or next(
        (each.__dict__[BASE] for each in kind.__mro__ if BASE in each.__dict__), kind
    )
    forward: Callable[..., Any] = base.forward
    return forward


class Plan:
    """Holds a function that does the same as a forward, or None if there is no such function.

    It holds as long as its conditions are met, the layers of its chains are plain, those of other chains are not, and
    convolutions that have no chain because of their class keep it.
    """

    def __init__(
        self,
        conditions: Conditions,
        function: Callable[..., Any] | None = None,
        layers: Sequence[Layers] = (),
        others: Sequence[Layers] = (),
        classes: Sequence[tuple[nn.Module, type]] = (),
        blocks: Sequence[Block] = (),
    ) -> None:
        self.function, self._conditions, self.blocks = function, conditions, blocks
        self._layers, self._others, self._classes = layers, others, classes

    def holds(self, module: nn.Module) -> bool:
        if not self._conditions.hold(module.__dict__):
            return False
        for layers in self._layers:
            if not layers.are_plain():
                return False
        if any(type(layer) is not kind for layer, kind in self._classes):
            return False
        return not any(layers.are_plain() for layers in self._others)


def make_plan(module: nn.Module, function: Callable[..., Any], arguments: Sequence[Any]) -> Plan:
    """Returns the plan for a kind of call, in which `TENSOR` stands for a tensor."""
    try:
        explored = Explored(module, function, arguments, lambda layer: type(layer) is ConvTranspose3d)
    except CannotRead as error:
        return Plan(error.conditions)
    read, conditions = explored.read, explored.read.conditions
    _watch_modules(explored)
    layers = {chain: Layers(explored.touched(chain)) for chain in explored.found.chains}
    fused = [chain for chain in layers if layers[chain].are_plain()]
    others = [layers[chain] for chain in layers if chain not in fused]
    if not fused:
        return Plan(conditions, None, (), others, explored.others)

    calls: dict[Any, Callable[..., Any]] = {}

    blocks: list[Block] = []

    def call(chain: Chain) -> tuple[Callable[..., Any], Any]:
        block, function = _call(explored, chain)
        blocks.append(block)
        return _named("fused_chain", function, calls), (chain.convolution.args[0], *chain.passed)

    chains.replace(read.graph, fused, call)
    function = _function(read.graph, calls, f"<fused forward of {type(module).__name__}>")
    return Plan(conditions, function, [layers[chain] for chain in fused], others, explored.others, blocks)


def _named(name: str, called: Callable[..., Any], calls: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns what stands for `called` in a graph.

    The nodes of a graph hold each other until Python looks for such circles, so they must not hold layers.
    """

    def stands_for() -> None:
        """Is never called."""

    stands_for.__name__ = name
    calls[stands_for] = called
    return stands_for


def _function(graph: fx.Graph, calls: Mapping[Any, Callable[..., Any]], file: str) -> Callable[..., Any]:
    """Returns a graph as a Python function of `self` and its inputs; `calls` says what its functions stand for."""
    code = graph.python_code("self")
    space = {
        name: calls[value] if isinstance(value, types.FunctionType) and value in calls else value
        for name, value in code.globals.items()
    }
    exec(compile(code.src, file, "exec"), space)
    found: Callable[..., Any] = space.pop("forward")
    return found


def _watch_modules(explored: Explored) -> None:
    """Makes conditions of the attributes by which chains are found, and of all attributes of a chain's modules.

    Functions of PyTorch that the forward calls are conditions too, because somebody may replace them. The
    mode of a norm is no condition: a chain looks at it in every call.
    """
    read, conditions = explored.read, explored.read.conditions
    for each in {inner for named in read.modules.values() for inner in named.modules()}:
        own = each.__dict__
        for name in _DECIDING:
            if name in own:
                conditions.same(own, name, own[name])
        if "p" in own:
            conditions.same(own, "training", own["training"])
    plain.watch_functions(conditions, (node.target for node in read.graph.nodes if node.op == "call_function"))
    nodes = [node for chain in explored.found.chains for node in chain.nodes if node.op == "call_module"]
    for part in {read.modules[str(node.target)] for node in nodes}:
        for name, value in part.__dict__.items():
            if not name.startswith("_") and name != "training" and not isinstance(value, Tensor):
                conditions.same(part.__dict__, name, value)


def _call(explored: Explored, chain: Chain) -> tuple[Block, Callable[..., Any]]:
    layer = explored.convolution(chain.convolution)
    norm = _triple(chain, explored.read.modules, layer)
    if norm is not None and len(chain.nodes) == 2:

        def triple(input: Tensor) -> Tensor:
            return convolve_relu_group_norm(layer, norm, input)

        return None, triple
    fused = FusedChain(layer, chain, explored.read, explored.module)

    def chained(input: Tensor, *passed: Any) -> Any:
        return fused.forward(input, *passed)

    return fused, chained


class Plans:
    """Holds the plans of one module. Copies and pickles of the module make plans of their own."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        self.owner = None if owner is None else weakref.ref(owner)
        self._plans: dict[Any, list[Plan]] = {}
        self._made = 0

    def __deepcopy__(self, memo: Any) -> Plans:
        return Plans()

    def __reduce__(self) -> Any:
        return Plans, ()

    def find(
        self, module: nn.Module, function: Callable[..., Any], key: Any, given: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Returns the function for calls of a kind, or None if the forward runs as it is written."""
        for plan in self._plans.get(key, ()):
            if plan.holds(module):
                return plan.function
        if self._made >= MOST_PLANS or sys.getprofile() is not None or plain.has_global_hooks():
            return None
        with one_at_a_time:  # while another thread traces, no module looks plain
            for plan in self._plans.get(key, ()):
                if plan.holds(module):
                    return plan.function
            self._made += 1
            plan = make_plan(module, function, [TENSOR if type(each) in _TENSORS else each for each in given])
            self._plans.setdefault(key, []).append(plan)
            return plan.function if plan.holds(module) else None

    def blocks(self, module: nn.Module) -> list[Block]:
        """Returns what runs the chains in calls like those that were made, as long as the module is as it was."""
        plans = [plan for same in self._plans.values() for plan in same if plan.holds(module)]
        return [block for plan in plans for block in plan.blocks]


class Signature:
    """Holds the parameters of a forward, and sorts the arguments of calls by them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        self.fits = all(each.kind in kinds for each in parameters)
        self.names = tuple(each.name for each in parameters)
        self.defaults = tuple(
            _MISSING if each.default is inspect.Parameter.empty else each.default for each in parameters
        )

    def sorted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Returns the arguments of a call in the order of the parameters, or None if they do not fit."""
        if not kwargs and len(args) == len(self.names):
            return args
        if len(args) > len(self.names):
            return None
        rest = [kwargs.get(name, default) for name, default in zip(self.names, self.defaults, strict=True)][
            len(args) :
        ]
        used = sum(name in kwargs for name in self.names[len(args) :])
        if used != len(kwargs) or any(each is _MISSING for each in rest):
            return None
        return (*args, *rest)

    def examples(self) -> list[tuple[Any, ...]]:
        """Returns typical kinds of calls: with the defaults, and with tensors where the default is None."""
        given = tuple(TENSOR if each is _MISSING else each for each in self.defaults)
        more = tuple(TENSOR if each is _MISSING or each is None else each for each in self.defaults)
        return [given] if given == more else [given, more]


PLANS = "_plans_of_tconv3d"  # the attribute of a module that holds its plans


def run(
    module: nn.Module,
    function: Callable[..., Any],
    signature: Signature,
    as_written: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs the forward `function` of a module with its chains fused, or `as_written` where that is not possible."""
    given = signature.sorted(args, kwargs) if signature.fits and not torch._C._is_tracing() else None
    if given is None:
        return as_written(module, *args, **kwargs)
    key: list[Any] = []
    tensors, on_gpu = [], False
    for each in given:
        kind = type(each)
        if kind in _TENSORS:
            tensors.append(each)
            key.append(TENSOR)
            on_gpu = on_gpu or each.is_cuda
        elif each is None:
            key.append(None)
        elif is_constant(each):
            key.append((kind, repr(each)))  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        else:
            return as_written(module, *args, **kwargs)
    plans = module.__dict__.get(PLANS)
    if plans is None:
        plans = module.__dict__[PLANS] = Plans(module)
    if plans.owner is None:
        plans.owner = weakref.ref(module)
    if plans.owner() is not module or not (on_gpu or current_backend() == "emulator"):
        return as_written(module, *args, **kwargs)
    found = plans.find(module, function, tuple(key), given)
    return as_written(module, *args, **kwargs) if found is None else found(module, *tensors)


def blocks_of(module: nn.Module) -> list[Block]:
    """Returns what runs the chains of a module that was called; nothing if its forward ran as it is written."""
    plans = module.__dict__.get(PLANS)
    return [] if plans is None else plans.blocks(module)


# ---- sequences as they are written


def run_in_a_row(sequence: nn.Module, input: Tensor) -> Tensor:
    """Runs a sequence layer by layer, with the block for every plain ConvTranspose3d -> ReLU -> GroupNorm."""
    if plain.forward_is_replaced(nn.Sequential):
        return nn.Sequential.forward(sequence, input)  # type: ignore[arg-type]
    layers: list[Any] = list(sequence._modules.values())
    index = 0
    while index < len(layers):
        if type(layers[index]) is ConvTranspose3d and _runs_as_triple(layers[index : index + 3]):
            input = convolve_relu_group_norm(layers[index], layers[index + 2], input)
            index += 3
        else:
            input = layers[index](input)
            index += 1
    return input


def _runs_as_triple(layers: Sequence[Any]) -> bool:
    """Tells whether three layers form a triple that has no hooks and no replaced methods."""
    return is_triple(layers) and not plain.has_global_hooks() and all(map(plain.is_plain_part, layers))


def is_triple(layers: Sequence[Any]) -> bool:
    """Tells whether a ReLU and a GroupNorm over the convolution's output channels follow the convolution."""
    if len(layers) != 3:
        return False
    convolution, relu, norm = layers
    return type(relu) is nn.ReLU and type(norm) is nn.GroupNorm and norm.num_channels == convolution.out_channels
