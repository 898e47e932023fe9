"""Offers up-convolutions with large kernels as convolutions with kernel 1, whose products all families share.

If the kernel of a layer equals its stride, each output belongs to one position and one tap. Written as channels of
its position (folded, device/fold.cuh), the output of a layer with C_out channels and T taps is the output of a layer
with C_out * T channels and kernel 1, and the weight is the same memory in both:

    forward          y' = w^T . x, then y is unfolded from y'
    input gradient   dx = w . dy', with dy folded to dy'
    weight gradient  dw = x . dy'^T

Tensor cores multiply these as plain matrix products, where a kernel that walks the taps of one or a few output
channels leaves them idle: 768 to 1 channels with kernel 16, for example, as in masked autoencoders. The planner is
asked for the cheapest cover of the folded layer, so this module needs no kernel of any family, and works on every GPU
that the families work on. The predicted time is that of the cover, one launch, and the bytes that are folded.

This module knows nothing of which families there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from .arguments import CONST_POINTER, DIVIDER, INT32, INT64, POINTER, STRIDES, Arguments
from .calibration import DEFAULT, Work
from .detour import Asking, Planning, behind_copies, renamed
from .geometry import Geometry, Triple
from .launch import Launch
from .offers import Answer, Cover, Offer, Refusal, Wanted
from .problem import Device, Pass, Plan, Problem, Strides, channels_last_strides, contiguous_strides, is_channels_last
from .scalars import INT32_MAX
from .workspace import placed

KERNEL = "fold"
LEAST_TAPS = 65  # families of up-convolutions take kernels of up to 4 x 4 x 4 taps
MOST_CHANNELS = 2**16  # channels of the folded layer
MOST_BYTES = 2**28  # bytes of the folded tensor
THREADS = 256
FOLDED, FOLDED_BIAS = "folded", "folded bias"  # regions of the workspace
PASSES = (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)
WORDS = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}  # C++ types that elements are copied as

FOLD = Arguments(
    KERNEL,
    source=CONST_POINTER("The tensor that is read."),
    target=POINTER("The tensor that is written."),
    whole_strides=STRIDES("Strides of the tensor that is not folded."),
    item=INT64("Elements of the folded tensor from one batch item to the next."),
    channel=INT64("Elements of the folded tensor from one output channel to the next."),
    tap=INT64("Elements of the folded tensor from one tap to the next."),
    position=INT64("Elements of the folded tensor from one position to the next."),
    runs=INT64("Lines of taps along w, of all positions, channels and batch items."),
    kernel_d=INT32("Taps along d."),
    by_positions=DIVIDER("Divides by the positions of a batch item."),
    by_lines=DIVIDER("Divides by the lines of taps of a position."),
    by_channels=DIVIDER("Divides by the output channels."),
    by_w=DIVIDER("Divides by the positions along w."),
    by_h=DIVIDER("Divides by the positions along h."),
    by_kernel_h=DIVIDER("Divides by the taps along h."),
)


@dataclass(frozen=True)
class Folded:
    """Describes how the outputs of a layer lie in the folded tensor."""

    geometry: Geometry
    batch: int
    size: Triple
    item_bytes: int
    taps_first: bool  # channels of the folded tensor are ordered by tap, then output channel, as in the weight
    rows: bool  # the folded tensor is channels-last

    @property
    def channels(self) -> int:
        return self.geometry.out_channels * self.geometry.taps

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.size)

    @property
    def strides(self) -> Strides:
        return channels_last_strides(self.shape) if self.rows else contiguous_strides(self.shape)

    @property
    def bytes(self) -> int:
        return self.item_bytes * prod(self.shape)

    def launch(self, source: str, target: str, whole: Strides, aligned: bool, back: bool = False) -> Launch:
        """Returns the launch that folds the operand `source` with strides `whole`, or unfolds it if `back`."""
        (kd, kh, kw), (d, h, w) = self.geometry.kernel, self.size
        item, step = self.strides[:2]
        position = self.strides[4]
        tap, channel = (step * self.geometry.out_channels, step) if self.taps_first else (step, step * kd * kh * kw)
        runs = self.batch * self.geometry.out_channels * kd * kh * d * h * w
        at_once = next(n for n in (16 // self.item_bytes, 8 // self.item_bytes, 1) if n and kw % n == 0)
        whole_vectors = aligned and whole[4] == 1 and not any(stride % at_once for stride in whole[:4])
        folded_vectors = tap == 1 and not any(stride % at_once for stride in (item, channel, position))
        vectors = (folded_vectors, whole_vectors) if back else (whole_vectors, folded_vectors)
        return FOLD.launch(
            -(-runs // THREADS),
            THREADS,
            (
                ("Word", WORDS[self.item_bytes]),
                ("kRun", kw),
                ("kBack", back),
                ("kAtOnce", at_once),
                ("kReadVectors", vectors[0]),
                ("kWriteVectors", vectors[1]),
            ),
            {"source": source, "target": target},
            whole_strides=whole,
            item=item,
            channel=channel,
            tap=tap,
            position=position,
            runs=runs,
            kernel_d=kd,
            by_positions=d * h * w,
            by_lines=kd * kh,
            by_channels=self.geometry.out_channels,
            by_w=w,
            by_h=h,
            by_kernel_h=kh,
        )


def is_up_convolution(geometry: Geometry) -> bool:
    """Tells whether every output of a layer belongs to exactly one position and one tap."""
    plain = all(axis.padding == axis.output_padding == 0 and axis.dilation == 1 for axis in geometry.axes)
    return plain and geometry.kernel == geometry.stride


def folded(problem: Problem) -> Folded | None:
    """Returns how a layer is folded, or None if its weight is not dense with all taps of a channel in order."""
    g = problem.geometry
    shape = (g.in_channels, g.out_per_group, *g.kernel)
    if problem.weight == contiguous_strides(shape):
        taps_first = False
    elif problem.weight == channels_last_strides(shape) and g.groups == 1:
        taps_first = g.out_channels > 1
    else:
        return None
    rows = is_channels_last(problem.input)
    return Folded(g, problem.batch, problem.input_size, problem.item_bytes, taps_first, rows)


def why_not(problem: Problem, device: Device) -> str | None:
    found = folded(problem)
    if problem.has_operands:
        return "what follows the convolution reads tensors that are not folded"
    if problem.channels:
        return "the channels of a position are not neighbours"
    if found is None:
        return "the weight is neither contiguous nor channels-last"
    if found.channels > MOST_CHANNELS:
        return f"{found.channels} channels of the folded layer are more than {MOST_CHANNELS}"
    if not device.workspace_bytes:
        return "memory is short"
    if found.bytes > MOST_BYTES or prod(found.shape) > INT32_MAX:
        return f"the folded tensor would take more than {MOST_BYTES >> 20} MB"
    return None


def inner(problem: Problem) -> Problem:
    """Returns the problem of the folded layer."""
    found = folded(problem)
    assert found is not None
    g = problem.geometry
    return replace(
        problem,
        geometry=Geometry.make(g.in_channels, found.channels, (1, 1, 1), groups=g.groups),
        weight=contiguous_strides((g.in_channels, found.channels // g.groups, 1, 1, 1)),
        output=found.strides,
        aligned=problem.aligned or problem.which is Pass.INPUT_GRAD,  # the folded dy is aligned
        norm=None,
    )


def answers(wanted: Wanted, device: Device, ask: Asking, plan_of: Planning) -> list[Answer]:
    """Returns offers for the wanted passes of a large up-convolution, each alone and both gradients together.

    `ask` and `plan_of` are the planner's. Nothing is returned for other layers.
    """
    asked = {which: problem for which, problem in wanted.items() if which in PASSES}
    main = next(iter(asked.values()), None)
    if main is None or main.batch == 0 or not is_up_convolution(main.geometry) or main.geometry.taps < LEAST_TAPS:
        return []
    # Gradients share a folded dy if both read it in the same order: dx and x may have different memory layouts.
    shared = len(asked) > 1 and len({folded(problem) for problem in asked.values()}) == 1
    groups = [(which,) for which in asked] + ([tuple(asked)] if shared else [])
    return [_answer({which: asked[which] for which in group}, device, ask, plan_of) for group in groups]


def _answer(wanted: Wanted, device: Device, ask: Asking, plan_of: Planning) -> Answer:
    passes, problem = tuple(wanted), next(iter(wanted.values()))
    for each in wanted.values():
        if refusal := why_not(each, device):
            return Refusal(KERNEL, passes, refusal)
    asked = {which: inner(each) for which, each in wanted.items()}
    try:
        cover = ask(asked, device)
    except NotImplementedError as error:
        return Refusal(KERNEL, passes, f"of the folded layer: {error}")
    make = partial(_plan, problem, partial(plan_of, cover, asked, device))
    return Offer(KERNEL, passes, problem, device, partial(_work, cover), make)


def _work(cover: Cover) -> Work:
    """Returns the work of a folded layer: the time of its products as cycles, and the launch that folds."""
    microseconds = sum(offer.microseconds for offer in cover)
    return Work(1, 1e3 * microseconds / DEFAULT["kilocycles"])


def _plan(problem: Problem, products: Callable[[], Plan]) -> Plan:
    return (_unfolded_forward if problem.which is Pass.FORWARD else _folded_gradients)(problem, products())


def _folded_gradients(problem: Problem, products: Plan) -> Plan:
    """Returns the plan of gradients: dy is folded, and then multiplied."""
    layer = folded(problem)
    assert layer is not None
    fold = layer.launch("dy", FOLDED, problem.output, problem.aligned)
    why = f"dy folded to {layer.channels} channels and kernel 1, then"
    plan = behind_copies(products, fold, {"dy": (FOLDED, layer.bytes)}, why)
    return replace(plan, tile=products.tile or f"{layer.channels} channels of {prod(layer.size)} positions")


def _unfolded_forward(problem: Problem, products: Plan) -> Plan:
    """Returns the plan of a forward pass: products with a folded output, which is then unfolded to y.

    A launch that packs the weight stays the first, so that calls without gradients can skip it.
    """
    layer = folded(problem)
    assert layer is not None
    bias = replace(layer, batch=1, size=(1, 1, 1))
    sizes = [(FOLDED, layer.bytes), *([(FOLDED_BIAS, bias.bytes)] if problem.bias else [])]
    workspace_bytes, regions = placed(sizes, products.workspace_bytes)
    # Without a bias, launches name it too and get a null pointer.
    names = {"y": FOLDED, **({"bias": FOLDED_BIAS} if problem.bias else {})}
    launches = renamed(products, names)
    if problem.bias:  # the bias of a channel is repeated for its taps: a tensor whose strides but one are 0
        packing = 1 if products.packed_bytes else 0
        repeat = bias.launch("bias", FOLDED_BIAS, (0, 1, 0, 0, 0), aligned=False)
        launches.insert(packing, repeat)
        launches[packing + 1] = replace(launches[packing + 1], overlaps=False)
    launches.append(layer.launch(FOLDED, "y", problem.output, True, back=True))
    return replace(
        products,
        kernel=f"{products.kernel} + {KERNEL}",
        why=f"{products.why}; y is unfolded from {layer.channels} channels",
        launches=tuple(launches),
        workspace_bytes=workspace_bytes,
        regions=(*products.regions, *regions),
        moments=0,
        kept=None if products.kept is None else _unfolded_forward(problem, products.kept),
    )
