"""Exported files: what they import, that they compile for every GPU, and that they compute what the layer computes.

Without a GPU an exported file runs here in the emulator, whole: its Python, its C++ (with the headers of `fake_cuda/`
in place of CUDA's), its launches and its kernels. Only inline assembly is the emulator's.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exported_files import load_emulated, load_file
from places import ROOT
from torch import Tensor, nn
from torch.utils import cpp_extension

from tconv3d import emulator
from tconv3d.runtime import compiler
from tconv3d.tools import cli, export, tasks
from tconv3d.tools.bench import layers
from tconv3d.tools.bench.precision import LAYOUTS, TOLERANCE, precision
from tconv3d.tools.export.program import Declaration, Unit

FORMATS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ModuleType]:
    """Exports a layer of `SMALL` for the emulator, and imports the file."""

    def load(layer: str, capability: tuple[int, int]) -> ModuleType:
        monkeypatch.setattr(cpp_extension, "load_inline", load_emulated(tmp_path))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        path = tmp_path / "exported_layer.py"
        path.write_text(emulated_text(layer, "H200" if capability == HOPPER else "any"))
        module = load_file("exported_layer", path)
        module.DEVICE = "cpu"
        return module

    return load


@functools.cache
def emulated_text(layer: str, gpu: str) -> str:
    return export.export(SMALL[layer], *TYPES[layer], [gpu], emulated=True)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact.detach()).norm() / exact.detach().norm())


def check_model(module: ModuleType, which: str, layout: str, device: str) -> None:
    """Outputs and gradients of an exported model beside PyTorch's in float64."""
    torch.manual_seed(7)
    dtype = torch.float32 if which == "tf32" else getattr(torch, which)
    model = module.ModelNew(*module.get_init_inputs()).to(device, dtype).to(memory_format=LAYOUTS[layout])
    (x,) = (x.to(device, dtype) for x in module.get_inputs())
    if hasattr(module, "NORM_SETTINGS"):
        whole_numbers(model, x)
    x = x.to(memory_format=LAYOUTS[layout]).requires_grad_()
    exact = copy.deepcopy(model).double()
    x64 = x.detach().double().requires_grad_()
    expected = reference(exact, x64)
    dy = torch.randn_like(expected).to(dtype)
    expected.backward(dy.double())
    with precision(which):
        y = model(x)
        y.backward(dy)
        with torch.no_grad():
            assert torch.equal(model(x), y), "without gradients"
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=LAYOUTS[layout])
    found = {"y": (y, expected), "x.grad": (x.grad, x64.grad)}
    parameters = zip(model.named_parameters(), exact.parameters(), strict=True)
    found |= {name: (ours.grad, theirs.grad) for (name, ours), theirs in parameters}
    errors = {name: relative_error(ours, theirs) for name, (ours, theirs) in found.items()}
    # A norm's gradients are differences of numbers that were rounded when the convolution stored them.
    limit = TOLERANCE[which] * (4 if hasattr(module, "NORM_SETTINGS") else 1)
    assert all(error < limit for error in errors.values()), errors


def whole_numbers(model: nn.Module, x: Tensor) -> None:
    """Small integers, of which every convolution here is exact: no rounding changes what the ReLU lets pass."""
    with torch.no_grad():
        for tensor in (x, *model.parameters()):
            tensor.copy_(torch.randint(-2, 3, tensor.shape))
        for norm in (module for module in model.modules() if isinstance(module, nn.GroupNorm)):
            norm.weight.normal_()
            norm.bias.normal_()


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """What the layers of an exported model compute, by PyTorch."""
    convolution, *norm = (module for module in model.modules() if not list(module.children()))
    y: Tensor = convolution(x)
    return norm[0](y.relu()) if norm else y


# ---- in the emulator


# Layers small enough for the emulator; all kernel families are in one or the other's passes.
SMALL = {
    "strided, bias": "16, 24, kernel_size=3, stride=2, padding=1, output_padding=1, size=(3, 4, 5), batch=2",
    "few outputs": "16, 2, kernel_size=4, stride=2, padding=1, size=(3, 4, 4)",
    "block": "16, 24, kernel_size=3, stride=2, padding=1, size=(3, 4, 5), batch=2, norm_groups=4",
    "block, no bias": "8, 16, kernel_size=(3, 2, 3), size=(4, 5, 6), bias=False, norm_groups=2",
}
HOPPER, OTHER = (9, 0), (8, 6)
# The precisions and layouts of a file: what its tests run.
TYPES = {
    "strided, bias": (("tf32",), ("contiguous",)),
    "few outputs": (("float32", "float16"), ("contiguous",)),
    "block": (("tf32",), ("channels_last_3d",)),
    "block, no bias": (("float16",), ("channels_last_3d",)),
}
CASES = [  # few: each compiles a whole file
    ("strided, bias", HOPPER, "tf32", "contiguous"),
    pytest.param("few outputs", OTHER, "float32", "contiguous", marks=pytest.mark.thorough),
    pytest.param("block", OTHER, "tf32", "channels_last_3d", marks=pytest.mark.thorough),
    ("block, no bias", HOPPER, "float16", "channels_last_3d"),
]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("layer", "capability", "which", "layout"), CASES)
def test_exported_files_compute_in_the_emulator(
    emulated: Callable[..., ModuleType], layer: str, capability: tuple[int, int], which: str, layout: str
) -> None:
    check_model(emulated(layer, capability), which, layout, "cpu")


@needs_compiler
def test_inputs_that_are_not_as_the_kernels_read_them(emulated: Callable[..., ModuleType]) -> None:
    module = emulated("strided, bias", HOPPER)
    model = module.ModelNew(*module.get_init_inputs())
    x = torch.randn(*module.SHAPE[:-1], module.SHAPE[-1] + 1)[..., 1:]  # neither contiguous nor aligned
    grads = []
    with precision("tf32"):
        assert torch.equal(model(x), model(x.contiguous()))
        for grad in (torch.ones(()).expand(model(x).shape), torch.ones(model(x).shape)):  # strides of zero: of a sum
            model.zero_grad()
            model(x).backward(grad)
            grads.append(model.conv_transpose3d.weight.grad.clone())
    assert torch.equal(*grads)


def pending(tensor: Tensor, how: str) -> Tensor:
    """The tensor with its minus sign left out of memory, or zeros without memory."""
    if how == "zeros":
        return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
    return torch._neg_view(-tensor)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("layer", ["strided, bias", pytest.param("block", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", ["minus sign", pytest.param("zeros", marks=pytest.mark.thorough)])
def test_tensors_whose_elements_are_not_in_memory(emulated: Callable[..., ModuleType], layer: str, how: str) -> None:
    """Signs and zeros that PyTorch has not written yet: of the input, every parameter, the output gradient."""
    module = emulated(layer, HOPPER if layer == "strided, bias" else OTHER)
    model = module.ModelNew(*module.get_init_inputs())
    (x,) = module.get_inputs()
    x = x.to(memory_format=next(iter(module.LAYOUTS.values())))
    values = {"x": x, "dy": torch.randn(reference(model, x).shape)}
    values |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    with precision("tf32"):
        # Zeros without memory are contiguous, and a file without that layout refuses them as an input.
        refused = {"x"} if how == "zeros" and "contiguous" not in module.LAYOUTS else set()
        for name in values.keys() - refused:
            lazy = values | {name: pending(values[name], how)}
            written = values | {name: lazy[name].clone()}
            both = [_gradients_of(model, tensors) for tensors in (lazy, written)]
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True)), name


def _gradients_of(model: nn.Module, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The result, and the gradients of the input and of every parameter."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if name != "dy"}
    assert all(leaves[name].is_neg() == tensors[name].is_neg() for name in leaves)
    x, *parameters = leaves.values()
    names = [name for name in leaves if name != "x"]
    y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
    return [y, *torch.autograd.grad(y, [x, *parameters], tensors["dy"])]


@needs_compiler
def test_gradients_are_computed_when_they_are_asked_for(emulated: Callable[..., ModuleType]) -> None:
    module = emulated("strided, bias", HOPPER)
    model = module.ModelNew(*module.get_init_inputs())
    model.conv_transpose3d.weight.requires_grad_(False)
    (x,) = module.get_inputs()
    with precision("tf32"):
        y = model(x)
        y.sum().backward()
    volume = float(y[:, 0].numel())
    torch.testing.assert_close(model.conv_transpose3d.bias.grad, torch.full((24,), volume))
    assert model.conv_transpose3d.weight.grad is None


@needs_compiler
def test_second_derivatives(emulated: Callable[..., ModuleType]) -> None:
    """Gradients of gradients by the file's kernels, of an input that is not as they read it; bits are exact."""
    module = emulated("strided, bias", HOPPER)
    model = module.ModelNew(*module.get_init_inputs())
    (x,) = module.get_inputs()
    whole_numbers(model, x)
    found = []
    for ours in (model, copy.deepcopy(model).double()):
        call = ours if ours is model else functools.partial(reference, ours)
        torch.manual_seed(2)
        given = x.transpose(3, 4).contiguous().transpose(3, 4).to(next(ours.parameters()).dtype).requires_grad_()
        with precision("tf32"):
            y = call(given)
            dy = torch.randint(-2, 3, y.shape).to(y).requires_grad_()
            leaves = [given, *ours.parameters()]
            first = torch.autograd.grad(y, leaves, dy, create_graph=True)
            product = sum((each * torch.randint(-1, 2, each.shape).to(each)).sum() for each in first)
            found.append([*first, *torch.autograd.grad(product, [dy, *leaves], allow_unused=True)])
    assert found[0][-1] is None and found[1][-1] is None  # nothing depends on the bias
    assert all(torch.equal(a.double(), b) for a, b in zip(found[0][:-1], found[1][:-1], strict=True))


@needs_compiler
@pytest.mark.thorough
def test_autocast_chooses_the_type(emulated: Callable[..., ModuleType]) -> None:
    module = emulated("few outputs", HOPPER)
    model = module.ModelNew(*module.get_init_inputs())
    (x,) = module.get_inputs()
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    assert y.dtype is torch.float16
    y.sum().backward()
    assert model.conv_transpose3d.weight.grad.dtype is torch.float32
    assert relative_error(y, reference(model.double(), x.double())) < TOLERANCE["float16"]


@needs_compiler
def test_what_an_exported_file_refuses(emulated: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file was not exported for names the option that adds it."""
    module = emulated("few outputs", OTHER)
    model = module.ModelNew(*module.get_init_inputs())
    x = torch.randn(module.SHAPE)
    with pytest.raises(ValueError, match=r"shape \(1, 16, 3, 4, 4\), got \(2, 16, 3, 4, 4\)"):
        model(torch.randn(2, 16, 3, 4, 4))
    with pytest.raises(ValueError, match=r"exported for .*'bias': True.*, got .*'bias': False"):
        module.ModelNew(16, 2, 4, 2, 1, bias=False)(x)
    with pytest.raises(TypeError, match=r"one type, got torch.float64, torch.float32"):
        model(x.double())
    with pytest.raises(TypeError, match=r"holds float32 float16, not bfloat16: export it with --dtype .* bfloat16"):
        module.ModelNew(*module.get_init_inputs()).bfloat16()(x.bfloat16())
    with pytest.raises(ValueError, match="export it with --layout channels_last_3d"):
        model(x.to(memory_format=torch.channels_last_3d))
    with pytest.raises(ValueError, match="one cpu device, got meta and cpu"):
        model(torch.randn(module.SHAPE, device="meta"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"8\.0 or higher expected, got 7\.5"):
        model(x)


# ---- the text


def exported(name: str, *dtypes: str, forward_only: bool = False) -> str:
    return text_for_h200(name, dtypes, forward_only)


@functools.cache
def text_for_h200(name: str, dtypes: tuple[str, ...], forward_only: bool) -> str:
    return export.export(name, dtypes, gpus=["H200"], forward_only=forward_only)


LAYER = "32, 16, kernel_size=(1, 2, 3), stride=2, size=(4, 6, 8), batch=3, groups=2"


def test_the_file_imports_nothing_but_pytorch() -> None:
    tree = ast.parse(exported(SMALL["few outputs"], "tf32"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in found} - set(sys.stdlib_module_names) == {"torch"}
    assert len(ast.get_docstring(tree) or "") > 100


@pytest.mark.parametrize("name", ["large_volume", SMALL["few outputs"]])
def test_the_file_is_in_the_house_style(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    path = tmp_path / "model_new.py"
    path.write_text(exported(name, "tf32"))
    for command in (["check"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("forward_only", "most"), [(False, 3500), (True, 2000)])
def test_files_are_short(forward_only: bool, most: int) -> None:
    assert exported("large_volume", "tf32", forward_only=forward_only).count("\n") <= most


@pytest.mark.parametrize("name", ["large_volume", SMALL["few outputs"]])
def test_nothing_in_the_source_is_unused(name: str) -> None:
    """Every function, struct, constant and type is mentioned again, and comments mention what there is."""
    source = source_of(exported(name, "tf32"), "CUDA_SOURCE")
    code = re.sub(r"//[^\n]*", "", source)
    words = re.findall(r"[A-Za-z_]\w*", code)
    unit = Unit(
        "exported", code[code.index("namespace") : code.index("inline void check(")].rsplit("namespace", 1)[0]
    )
    found = [each for each in declarations(unit.declarations) if each.kind != "member" and each.name != "operator"]
    assert len(found) > 20
    assert not [each.name for each in found if words.count(each.name) < 2]
    assert not re.search(r"\b\w+\.cuh\b|\b\w+\.py\b|TCONV3D_|#if", source)
    mentioned = set(re.findall(r"\bk[A-Z]\w*", "".join(re.findall(r"//[^\n]*", source))))
    assert mentioned <= set(words)


def declarations(found: list[Declaration]) -> list[Declaration]:
    return [
        each
        for declaration in found
        for each in (declaration, *declarations([m for inner in declaration.members.values() for m in inner]))
    ]


# KernelBench reads a file as text before it runs it. These are the rules of its static checker in our words, on a
# text without comments: `#` and `//` end a line there, in Python and in C++.
FORBIDDEN = {
    "statements that catch errors": r"\btry\s*:|\bexcept\b",
    "a word that does nothing": r"\bpass\b",
    "layers of torch.nn by their full name": r"torch\.nn\.(?!(Module|Parameter|ModuleList|init)\b)",
    "functional operators": r"\bnn\.functional\.|\bF\.[a-z]",
    "operators that compute": r"\btorch\.(relu|conv\w*|matmul|group_norm|clamp|softmax|sigmoid|tanh|gelu)\b",
    "streams": r"cuda\.Stream\s*\(|\.(wait|record)_stream\s*\(|torch\.cuda\.stream",
    "threads and processes": r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures",
    "subclasses of tensors": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)",
    "clocks that are replaced": r"torch\.cuda\.(Event|synchronize)\S*\s*=|time\.(time|perf_counter)\s*=",
    "halves in place of float32": r"__float2half|static_cast\s*<\s*(__half|half)\s*>",
    "casts to halves": r"\.half\s*\(|\.to\(\s*torch\.(float16|half)",
}


@pytest.mark.parametrize(("name", "dtype"), [("large_volume", "tf32"), (SMALL["block, no bias"], "float16")])
def test_files_are_what_kernel_benchmarks_accept(name: str, dtype: str) -> None:
    text = exported(name, dtype)
    bare = re.sub(r"(#|//).*", "", text)
    assert {what for what, pattern in FORBIDDEN.items() if re.search(pattern, bare)} == set()
    assert "__global__" in bare and "load_inline" in bare


def test_files_load_behind_two_lines() -> None:
    """A benchmark puts lines that choose the folder of extensions before a file and executes the whole."""
    space: dict[str, Any] = {}
    exec(compile(f"import os\nos.environ.get('X')\n{exported('large_volume', 'tf32')}", "file", "exec"), space)
    assert issubclass(space["ModelNew"], nn.Module)


@pytest.mark.parametrize("name", ["large_volume", "relu_group_norm"])
def test_constructor_inputs_and_parameters_are_the_tasks(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(exported(name, "tf32", forward_only=name != "large_volume"))
    module, task = load_file("model_new", path), tasks.load(name)
    same_constructor_and_parameters(module.ModelNew, task.Model, task.get_init_inputs())
    assert module.get_init_inputs() == task.get_init_inputs()
    assert task.SHAPE == module.SHAPE
    with torch.device("meta"):
        assert module.get_inputs()[0].shape == task.SHAPE
        assert module.SETTINGS.items() <= vars_of(task.Model(*task.get_init_inputs())).items()


def same_constructor_and_parameters(ours: type[nn.Module], theirs: type[nn.Module], arguments: list[Any]) -> None:
    signatures = (inspect.signature(kind).parameters for kind in (ours, theirs))
    first, second = ([(p.name, p.default) for p in found.values()] for found in signatures)
    assert first == second
    states = []
    for kind in (ours, theirs):
        torch.manual_seed(5)
        states.append(kind(*arguments).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


def vars_of(model: nn.Module) -> dict[str, Any]:
    (layer,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    return {**vars(layer), "bias": layer.bias is not None}


@needs_compiler
def test_what_an_exported_block_refuses(emulated: Callable[..., ModuleType]) -> None:
    module = emulated("block", OTHER)
    model = module.ModelNew(*module.get_init_inputs())
    (x,) = module.get_inputs()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="does not know autocast"):
        model(x)
    assert "The gradients cannot be differentiated again" in str(module.__doc__)
    model.group_norm.eps = 0.5
    with pytest.raises(ValueError, match=r"exported for .*'eps': 1e-05.*, got .*'eps': 0.5"):
        model(x)


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layer.py"
    words = ["export", LAYER, "--dtype", "float16", "--gpu", "H200", "--forward-only", "-o", str(path)]
    assert cli.main(words) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert f"    tconv3d export '{LAYER}' --dtype float16 --gpu H200 --forward-only\n" in path.read_text()
    assert cli.main(["export", "no_such_task", "-o", str(path)]) == 1
    assert "no layer is called 'no_such_task'" in capsys.readouterr().err
    assert cli.main(["export", "-o", str(path)]) == 1
    assert "expected a task or a layer, or --like" in capsys.readouterr().err
    assert cli.main([*words[:-1], str(tmp_path / "nowhere" / "x.py")]) == 1
    assert "cannot write" in capsys.readouterr().err


# ---- compiled for GPUs


def source_of(text: str, name: str) -> str:
    (value,) = (
        node.value.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name
        if isinstance(node.value, ast.Constant)
    )
    return str(value)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("name", "which"), [("large_volume", "tf32"), ("relu_group_norm", "tf32")])
def test_nvcc_compiles_tasks_without_a_warning(name: str, which: str, tmp_path: Path) -> None:
    """Warnings of unused variables (177), of variables that are only set (550) and of parameters (869) included."""
    source = tmp_path / "cuda.cu"
    source.write_text(source_of(exported(name, which, forward_only=name != "large_volume"), "CUDA_SOURCE"))
    flags = ["-std=c++20", *cpp_extension.COMMON_NVCC_FLAGS, "-gencode=arch=compute_90a,code=sm_90a"]
    flags += ["-Xcudafe", "--diag_warning=177", "-Xcudafe", "--diag_warning=550", "-Xcudafe", "--diag_warning=869"]
    words = ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "cuda.o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


CHEAP = ("depthwise_64", "nnunet_320_320_4")  # layers of the README whose forward pass is exported within seconds


@pytest.mark.parametrize(
    ("name", "forward_only"),
    [
        *((name, True) for name in CHEAP),
        *(
            pytest.param(name, forward_only, marks=pytest.mark.thorough)
            for name in layers.LAYERS
            for forward_only in (False, True)
            if not (forward_only and name in CHEAP)
        ),
    ],
)
def test_nvrtc_compiles_the_kernels_of_every_layer(name: str, forward_only: bool) -> None:
    """Without a warning, and a benchmark's checker finds nothing in the file."""
    try:
        compiler.version()
    except compiler.MissingCompilerError as error:
        pytest.skip(str(error))
    from cuda.core import Program, ProgramOptions

    text = exported(name, "tf32", forward_only=forward_only)
    bare = re.sub(r"(#|//).*", "", text)
    assert {what for what, pattern in FORBIDDEN.items() if re.search(pattern, bare)} == set()
    device, _, _ = source_of(text, "CUDA_SOURCE").partition("// ==== Launching")
    device = re.sub(r"^#include.*", "", device, flags=re.MULTILINE)
    log = io.StringIO()
    Program(
        device, "c++", ProgramOptions(arch="sm_90a", std="c++20", device_as_default_execution_space=True)
    ).compile("cubin", logs=log)
    assert "warning" not in log.getvalue(), log.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("nvcc", "ninja"))), reason="nvcc or ninja is not installed")
@pytest.mark.thorough
def test_load_inline_compiles_both_sources_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what the file's call of load_inline does but the link, for which PyTorch must be one with CUDA."""
    said = []

    def run_ninja(directory: str, *others: Any, **named: Any) -> None:
        words = ["ninja", "-v", "main.o", "cuda.cuda.o"]
        done = subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        said.append(done.stdout)

    listed = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    (top,) = re.findall(r"^#\$ TOP=(.*)$", listed, re.MULTILINE)
    generated = tmp_path / "include" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"  # what a CPU build lacks
    generated.parent.mkdir(parents=True)
    generated.write_text("#pragma once\n")
    monkeypatch.setenv("CPATH", str(tmp_path / "include"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(Path(top).resolve()))
    monkeypatch.setattr(cpp_extension, "_run_ninja_build", run_ninja)
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda *others, **named: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    path = tmp_path / "model_new.py"
    path.write_text(
        export.export("8, 8, kernel_size=3, groups=8, size=4", ["float16"], gpus=["H200"], forward_only=True)
    )
    load_file("model_new", path).extension(0, "float16", "contiguous")
    assert "warning" not in said[0] and "sm_90a" in said[0]
    assert all(flag in said[0] for flag in cpp_extension.COMMON_NVCC_FLAGS)


# ---- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: load_inline compiles, and kernels run")
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("which", ["tf32", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [*tasks.NAMES, *SMALL])
def test_exported_files_compute_on_a_gpu(name: str, which: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(export.export(SMALL.get(name, name), [which], [layout]))
    check_model(load_file("model_new", path), which, layout, "cuda")
