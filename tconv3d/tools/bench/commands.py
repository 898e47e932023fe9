"""Defines the flags of the commands `demo`, `bench`, `verify`, `tune` and `report`, and runs them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

import tconv3d
from tconv3d.planning import gpus
from tconv3d.planning.gpus import AS
from tconv3d.tools import tables, tasks
from tconv3d.tools.arguments import MOST_SEED, integer, seconds, shape

from . import cases, layers, models, picture, report, results, run, table, tails, wide
from .layers import Layer
from .precision import DTYPES, LAYOUTS, precision
from .tails import TAILS


def add(commands: Any) -> None:
    """Adds the commands to an argparse parser's subcommands."""
    demo = commands.add_parser("demo", help="the reference tasks, timed on the GPU or checked in the emulator")
    demo.add_argument("task", nargs="*", metavar="TASK", help=f"only these, of: {', '.join(tasks.NAMES)}")
    demo.set_defaults(run=_demo, json=None)

    bench = commands.add_parser("bench", help="time layers or a model's beside PyTorch's; needs a GPU")
    _add_selection(bench)
    bench.add_argument("--backward", action="store_true", help="the gradients too")
    bench.add_argument("--model", action="append", default=[], metavar="PACKAGE:FACTORY", help=_MODEL_HELP)
    bench.add_argument("--input", type=shape, metavar="SHAPE", help="the model's input: 1x1x96x96x96")
    bench.add_argument("--no-torch", action="store_true", help="only ours, without PyTorch's variants")
    bench.add_argument("--offers", action="store_true", help=_OFFERS_HELP)
    bench.add_argument("--host", action="store_true", help="the host's time to launch a layer too")
    bench.add_argument("--tails", action="store_true", help=_TAILS_HELP)
    bench.add_argument(
        "--tail", nargs="+", choices=TAILS, metavar="TAIL", help=f"with --tails, of: {', '.join(TAILS)}; default: all"
    )
    bench.add_argument("--way", choices=cases.WAYS, help=_WAY_HELP)
    bench.add_argument(
        "--budget", type=seconds, default=0.15, metavar="S", help="seconds for one timing; default 0.15"
    )
    bench.set_defaults(run=_bench)

    verify = commands.add_parser("verify", help="errors against float64, PyTorch's beside ours; needs no GPU")
    _add_selection(verify)
    verify.set_defaults(run=_verify)

    tuner = commands.add_parser("tune", help="try builds of layers' kernels and keep the fastest; needs a GPU")
    _add_layers(tuner)
    tuner.add_argument("--no-gradients", action="store_true", help="only the forward pass")
    tuner.add_argument("--candidates", type=integer(1), default=8, metavar="N", help="builds to try; default 8")
    tuner.set_defaults(run=_tune)

    page = commands.add_parser("report", help="one self-contained page with charts, out of bench's results")
    page.add_argument("results", type=Path, metavar="RESULTS.json")
    page.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        help="a page, or a picture (.svg); default report.html",
    )
    page.add_argument("--dtype", choices=DTYPES, help="that a picture shows; default: the first in the results")
    page.add_argument("--layout", choices=LAYOUTS, help="likewise")
    page.add_argument("--pass", dest="which", choices=(*results.PASSES, results.STEPS[1]), help="likewise")
    page.set_defaults(run=_report)


_MODEL_HELP = (
    "all transposed convolutions of the model that this function returns, alone or with an example input, "
    "and the model as a whole"
)

_OFFERS_HELP = "with PyTorch's operator among the offers, timed at the first call; cudnn.benchmark is on"

_TAILS_HELP = (
    "layers with what follows them in networks, fused, beside our convolution alone and PyTorch's best of eager and "
    "torch.compile; --backward measures a whole training step, and --random draws pairs of a layer and a tail; "
    "without a GPU, results alone are checked, in the emulator"
)

_WAY_HELP = (
    "with --tails, what is measured: accelerate(model) (the default), fuse(layer, tail), or torch.compile of the "
    "accelerated model"
)

_WIDE_HELP = (
    "draw the random layers from nearly all that PyTorch takes, and for each one type of --dtype and one layout of "
    "--layout (default: tf32, bfloat16 and float16, both layouts)"
)

_AS_HELP = "plan as for this GPU (A100, 8.0, or A100,108 with its multiprocessors), and run on the GPU at hand"


def add_layer_flag(parser: argparse._ActionsContainer) -> None:
    """Adds the flag `--layer`, which may be given several times; `layers.parse` reads what it gets."""
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="LAYER",
        help='in the words of the constructor: "64, 32, kernel_size=2, stride=2, size=64, batch=2"',
    )


def _add_layers(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose layers, precisions and layouts."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(layers.LAYERS)}; default: all")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default tf32")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, help="default contiguous")
    add_layer_flag(parser)
    parser.add_argument("--random", type=integer(0), default=0, metavar="N", help="so many random layers")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="S", help="of the random layers; default 0")
    parser.add_argument("--wide", action="store_true", help=_WIDE_HELP)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    _add_layers(parser)
    parser.add_argument(
        "--input-seed", type=integer(0, MOST_SEED), metavar="S", help="of inputs and parameters; default: a new one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--as", dest="told", metavar="GPU", help=_AS_HELP)


def _selection(arguments: argparse.Namespace) -> list[run.Work]:
    """Returns the layers chosen by name, described by `--layer` and drawn at random; all named layers by default."""
    chosen = {**layers.named(arguments.names), **_described(arguments)}
    drawn: list[run.Work] = []
    if not arguments.wide:
        chosen |= layers.random_layers(arguments.random, arguments.seed)
    else:
        if not arguments.random:
            raise ValueError("--wide says how random layers are drawn: expected --random N beside it")
        precisions = arguments.dtype or ["tf32", "bfloat16", "float16"]
        found = wide.wide_layers(arguments.random, arguments.seed, precisions, arguments.layout or list(LAYOUTS))
        drawn = [run.Work(name, layer, kind) for name, (layer, kind) in found.items()]
    if not chosen and not drawn and not getattr(arguments, "model", []):
        chosen = dict(layers.LAYERS)
    return _in_all_kinds(chosen, arguments) + drawn


def _described(arguments: argparse.Namespace) -> dict[str, Layer]:
    """Returns the layers that `--layer` describes in words."""
    alone = len(arguments.layer) == 1
    return {
        "layer" if alone else f"layer_{number}": layers.parse(text) for number, text in enumerate(arguments.layer, 1)
    }


def _kinds(arguments: argparse.Namespace) -> list[wide.Kind]:
    return list(product(arguments.dtype or ["tf32"], arguments.layout or ["contiguous"]))


def _in_all_kinds(chosen: Mapping[str, Layer], arguments: argparse.Namespace) -> list[run.Work]:
    return [run.Work(name, layer, kind) for name, layer in chosen.items() for kind in _kinds(arguments)]


def _pairs(arguments: argparse.Namespace) -> list[run.Work]:
    """Returns the chosen layers, each with all chosen tails, and the pairs of a layer and a tail drawn at random."""
    names = arguments.tail or list(TAILS)
    chosen = {**tails.named(arguments.names), **_described(arguments)}
    if not chosen and not arguments.random:
        chosen = dict(tails.DEFAULT_LAYERS)
    pairs = [(name, layer, tail) for name, layer in chosen.items() for tail in names]
    pairs += tails.random_pairs(arguments.random, arguments.seed, names)
    return [run.Work(name, layer, kind, tail) for name, layer, tail in pairs for kind in _kinds(arguments)]


def _demo(arguments: argparse.Namespace) -> int:
    """Times the reference tasks beside PyTorch, or without a GPU checks them at reduced size in the emulator."""
    names = arguments.task or tasks.NAMES
    for name in names:
        tasks.load(name)  # raises for a name that no task has
    chosen = [run.Work(name, layers.LAYERS[name], ("tf32", "contiguous")) for name in names]
    options = run.Options(backward=True, command=_command(arguments))
    work = run.bench if run.have_gpu() else run.verify
    return _finish(arguments, lambda console, keep: work(chosen, options, console, keep=keep))


def _bench_tails(arguments: argparse.Namespace) -> int:
    for flag in ("model", "input", "offers", "host", "wide"):
        if getattr(arguments, flag):
            raise ValueError(f"--{flag} measures layers without tails: expected it without --tails")
    chosen = _pairs(arguments)
    options = replace(_options(arguments), way=arguments.way or cases.WAYS[0])
    return _finish(arguments, lambda console, keep: run.bench_tails(chosen, options, console, keep))


def _bench(arguments: argparse.Namespace) -> int:
    _be_told(arguments)
    if arguments.tails:
        return _bench_tails(arguments)
    if arguments.tail or arguments.way:
        raise ValueError("--tail and --way say how tails are measured: expected --tails beside them")
    chosen = _selection(arguments)
    sources = []
    for spec in arguments.model:
        model, example = models.load(spec, arguments.input)
        sources.append(run.Source(spec, model, example))
        found = models.layers_of(model, example)
        if not found:
            raise ValueError(f"no transposed convolution of {spec} is reached by its input")
        prefix = f"{spec.rpartition(':')[2]}." if len(arguments.model) > 1 else ""
        chosen += _in_all_kinds({f"{prefix}{name}": layer for name, layer in found.items()}, arguments)
    options = _options(arguments)
    return _finish(arguments, lambda console, keep: run.bench(chosen, options, console, sources, keep))


def _options(arguments: argparse.Namespace) -> run.Options:
    """Returns the options of `bench`."""
    return run.Options(
        kinds=_kinds(arguments),
        backward=arguments.backward,
        torch=not arguments.no_torch,
        host=arguments.host,
        offers=arguments.offers,
        budget_s=arguments.budget,
        seed=arguments.input_seed,
        command=_command(arguments),
    )


def _be_told(arguments: argparse.Namespace) -> None:
    """Makes the planner believe in the GPU that `--as` names, from the first call on."""
    if arguments.told is not None:
        os.environ[AS] = arguments.told
        gpus.as_told(gpus.GPUS[gpus.DEFAULT_GPU].device)  # raises for a GPU that is not known


def _verify(arguments: argparse.Namespace) -> int:
    _be_told(arguments)
    chosen = _selection(arguments)
    options = run.Options(kinds=_kinds(arguments), seed=arguments.input_seed, command=_command(arguments))
    return _finish(arguments, lambda console, keep: run.verify(chosen, options, console, keep))


def _tune(arguments: argparse.Namespace) -> int:
    if not run.have_gpu():
        raise RuntimeError("tune measures on a CUDA GPU of compute capability 8.0 or newer, and none is visible")
    for work in _selection(arguments):
        print(work.name, *work.kind)
        case = cases.build(work.layer, *work.kind, "cuda")
        with precision(work.kind[0]):
            tconv3d.tune(
                case.convolution,
                case.x,
                gradients=not arguments.no_gradients,
                candidates=arguments.candidates,
                report=tables.print_lines,
            )
    return 0


def _command(arguments: argparse.Namespace) -> str:
    """Returns the command line with the output file's name only: its directory means nothing on other machines."""
    words = [arguments.json.name if word == str(arguments.json) else word for word in arguments.words]
    return shlex.join(["tconv3d", *words])


def _finish(arguments: argparse.Namespace, work: Callable[[Console, run.Keep], results.Results]) -> int:
    """Runs the work, prints and writes the results, and returns the exit status.

    The status is 0 for success, 1 if a result is wrong or a layer failed, 130 after an interruption or SIGTERM.
    """
    os.environ.setdefault("TCONV3D_BACKGROUND", "0")  # no compiling in the background while layers are timed
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {arguments.json.parent} to write {arguments.json.name} in")
    console = Console()

    def keep(found: results.Results) -> None:
        if arguments.json is not None:
            found.write(arguments.json)

    with _interruptible():
        found = work(console, keep)
    table.show(found, console)
    if arguments.json is not None:
        found.write(arguments.json)
        print(f"wrote {arguments.json}", file=sys.stderr)
    if found.interrupted:
        return 130
    return 0 if found.ok else 1


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Treats SIGTERM, from `timeout` or a batch system, as an interruption, so that partial results are shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(arguments: argparse.Namespace) -> int:
    found = results.read(arguments.results)
    view = arguments.dtype, arguments.layout, arguments.which
    if arguments.output.suffix == ".svg":
        text = picture.picture(found, *view)
    elif any(view):
        raise ValueError("--dtype, --layout and --pass choose what a picture (.svg) shows; a page shows everything")
    else:
        text = report.page(found)
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {arguments.output}: {error.strerror}") from None
    print(f"wrote {arguments.output}")
    return 0
