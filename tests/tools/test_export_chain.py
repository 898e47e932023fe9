"""`tconv3d export --like` of models with operators behind the convolution: the library's bits, right gradients."""

from __future__ import annotations

import ast
import copy
import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exported_files import load_emulated, load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import cpp_extension

import tconv3d
from tconv3d import emulator
from tconv3d.tools import export
from tconv3d.tools.bench.precision import precision
from tconv3d.tools.export.formulas import formula
from tconv3d.torch_ops import executor

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")

REFERENCE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, channels, scale=2.0):
        super(Model, self).__init__()
        self.scale = scale
        self.up = nn.ConvTranspose3d(4, channels, 3, stride=2, padding=1)
        self.bias = nn.Parameter(torch.randn(channels, 1, 1, 1))
        self.batch_norm = nn.BatchNorm3d(channels)
        self.pool = nn.MaxPool3d(2)
        self.average = nn.AvgPool3d(2)

    def forward(self, x{more}):
{forward}

def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5){inputs}]

def get_init_inputs():
    return [8]
"""
# For each chain: lines of forward, and what follows the convolution as a function of its result and passed tensors.
CHAINS: dict[str, tuple[list[str], Callable[..., Tensor]]] = {
    "epilogue": (
        ["x = self.up(x)", "y = x.clone().detach()", "x = x + self.bias", "x = F.leaky_relu(x + y, 0.2) * y",
         "return torch.clamp(x, min=-1.0) / self.scale"],
        lambda m, z: torch.clamp(functional.leaky_relu(z + m.bias + z.detach(), 0.2) * z.detach(), min=-1.0) / 2.0,
    ),
    "passed tensor": (
        ["x = self.up(x)", "x = x + other", "return x * torch.nn.functional.hardswish(x)"],
        lambda m, z, other: (z + other) * functional.hardswish(z + other),
    ),
    "norm": (
        ["x = self.batch_norm(self.up(x))", "return x - torch.mean(x, dim=(2, 3, 4), keepdim=True)"],
        lambda m, z: (y := m.batch_norm(z)) - y.mean((2, 3, 4), keepdim=True),
    ),
    "pool and softmax": (
        ["x = torch.softmax(self.pool(self.up(x)), dim=1)", "x = x - self.bias.view(1, -1, 1, 1, 1)",
         "return torch.max(torch.sigmoid(x) * x, dim=1)[0]"],
        lambda m, z: ((y := m.pool(z).softmax(1) - m.bias.view(1, -1, 1, 1, 1)).sigmoid() * y).max(1)[0],
    ),
    "moved": (
        ["x = self.average(self.up(x) * self.scale)", "return torch.tanh(x + self.bias)"],
        lambda m, z: torch.tanh(m.average(z * 2.0) + m.bias),
    ),
    "left to PyTorch": (
        ["x = torch.clamp(self.up(x), 0.0, 1.0)", "b, c, d, h, w = x.shape",
         "return torch.cumsum(x.view(b, c, -1), dim=2).view(b, c, d, h, w)"],
        lambda m, z: z.clamp(0.0, 1.0).flatten(2).cumsum(2).view_as(z),
    ),
}  # fmt: skip


def text_of(name: str) -> str:
    passed = name == "passed tensor"
    lines = "\n".join(f"        {line}" for line in CHAINS[name][0])
    inputs = ", torch.rand(2, 8, 5, 7, 9)" if passed else ""
    return REFERENCE.format(more=", other" if passed else "", forward=lines, inputs=inputs)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ModuleType]:
    """Exports a chain for the emulator, and imports the file."""

    def load(name: str, layout: str = "contiguous", **options: Any) -> ModuleType:
        options = {"dtypes": ["float32"], "layouts": [layout], **options}
        monkeypatch.setenv("TCONV3D_AS", "H200,132")  # the library's plans in the emulator are those of the export
        monkeypatch.setattr(cpp_extension, "load_inline", load_emulated(tmp_path))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        executor.forget()
        text = export.export_like(text_of(name), gpus=["H200"], emulated=True, **options)
        path = tmp_path / "exported_chain.py"
        path.write_text(text)
        module = load_file("exported_chain", path)
        module.DEVICE = "cpu"
        executor.forget()
        return module

    return load


def models(module: ModuleType, name: str, layout: torch.memory_format) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The exported model, the reference, and the reference in float64, with the same parameters."""
    space: dict[str, Any] = {}
    exec(text_of(name), space)
    torch.manual_seed(3)
    reference = space["Model"](8)
    reference.up.to(memory_format=layout)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = module.ModelNew(8)
    ours.up.to(memory_format=layout)
    ours.load_state_dict(reference.state_dict())
    return ours, reference, copy.deepcopy(reference).double()


def close(got: Tensor | None, exact: Tensor | None, limit: float = 3e-6) -> bool:
    if got is None or exact is None:
        return got is exact
    return float((got - exact).detach().norm()) <= limit * (float(exact.detach().norm()) + 1)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("epilogue", "contiguous", marks=pytest.mark.thorough),
        ("passed tensor", "channels_last_3d"),
        pytest.param("norm", "channels_last_3d", marks=pytest.mark.thorough),
        ("pool and softmax", "contiguous"),
        pytest.param("moved", "contiguous", marks=pytest.mark.thorough),
    ],
)
def test_results_have_the_librarys_bits(loaded: Callable[..., ModuleType], name: str, layout: str) -> None:
    module = loaded(name, layout, forward_only=True)
    memory = getattr(torch, layout if layout != "contiguous" else "contiguous_format")
    ours, reference, exact = models(module, name, memory)
    inputs = [x.to(memory_format=memory) for x in module.get_inputs()]
    with torch.no_grad(), precision("float32"):
        y = ours(*inputs)
        block = tconv3d.fuse(reference.up, lambda z, *more: CHAINS[name][1](reference, z, *more))
        with tconv3d.use_backend("emulator"):
            assert torch.equal(y, block(*inputs))
        assert torch.equal(y, ours(*inputs)) or name == "norm"
        assert close(y, exact(*(x.double() for x in inputs)))
        if name == "norm":
            exact(*(x.double() for x in inputs))  # running statistics of two calls
        assert all(close(a.double(), b.double()) for a, b in zip(ours.buffers(), exact.buffers(), strict=True))
        for parameter in ours.parameters():  # nothing that was kept outlives a parameter's value
            parameter.mul_(1.5)
        exact.load_state_dict(ours.state_dict())
        assert close(ours(*inputs), exact(*(x.double() for x in inputs)))
    y = ours(*inputs)
    with pytest.raises(RuntimeError, match="exported with --forward-only"):
        y.sum().backward()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("moved", torch.float16, "channels_last_3d"),
        pytest.param("moved", torch.float32, "contiguous", marks=pytest.mark.thorough),
        pytest.param("norm", torch.float16, "contiguous", marks=pytest.mark.thorough),
        pytest.param("left to PyTorch", torch.float32, "channels_last_3d", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_several_types_and_layouts_in_one_file(
    loaded: Callable[..., ModuleType], name: str, dtype: torch.dtype, layout: str
) -> None:
    """The file branches where types and layouts are computed by other lines; every branch has the library's bits."""
    module = loaded(
        name, dtypes=["float32", "float16"], layouts=["contiguous", "channels_last_3d"], forward_only=True
    )
    memory = getattr(torch, layout if layout != "contiguous" else "contiguous_format")
    ours, reference, _ = (model.to(dtype) for model in models(module, name, memory))
    inputs = [x.to(dtype).to(memory_format=memory) for x in module.get_inputs()]
    block = tconv3d.fuse(reference.up, lambda z, *more: CHAINS[name][1](reference, z, *more))
    with torch.no_grad(), precision("float32"):
        y = ours(*inputs)
        with tconv3d.use_backend("emulator"):
            expected = block(*inputs)
    assert torch.equal(y, expected) and y.stride() == expected.stride()


def test_several_types_and_layouts_have_kernels_for_what_follows() -> None:
    """Conditions of branches are on types and layouts; kernels that differ stand between preprocessor conditions."""
    text = several("epilogue", forward_only=True)
    assert "PyTorch computes what follows" not in text and "kernels.fused_forward(" in text
    assert "    if model_bias.dtype == torch.float32:\n" in text  # float16 and bfloat16 have the same lines
    assert "    if layout == " not in text
    text = several("moved", forward_only=True)
    assert '    if weight.dtype == torch.float32 and layout == "contiguous":\n' in text
    assert " = kept(layout, weight, bias, model_bias)\n" in text


@functools.cache
def several(name: str, **options: Any) -> str:
    dtypes = ["float32", "float16", "bfloat16"]
    return export.export_like(text_of(name), dtypes, list(export.LAYOUTS), ["any"], **options)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["norm", pytest.param("passed tensor", marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_gradients(loaded: Callable[..., ModuleType], name: str) -> None:
    """By passes ("norm", with the library's bits), and by PyTorch behind the convolution's own kernels."""
    module = loaded(name)
    ours, reference, exact = models(module, name, torch.contiguous_format)
    inputs = [x.requires_grad_() for x in module.get_inputs()]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = exact(*wide)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with precision("float32"):
        y = ours(*inputs)
        y.backward(dy.float())
        assert close(y, expected)
        pairs = zip([*inputs, *ours.parameters()], [*wide, *exact.parameters()], strict=True)
        assert all(close(a.grad, b.grad, 1e-4) for a, b in pairs)
        if name == "norm":
            again = [x.detach().clone().requires_grad_() for x in inputs]
            block = tconv3d.fuse(reference.up, lambda z, *more: CHAINS[name][1](reference, z, *more))
            with tconv3d.use_backend("emulator"):
                block(*again).backward(dy.float())
            both = zip([*inputs, *ours.parameters()], [*again, *reference.parameters()], strict=True)
            assert all(a.grad is b.grad or torch.equal(a.grad, b.grad) for a, b in both)


@functools.cache
def exported(name: str, **options: Any) -> str:
    return export.export_like(text_of(name), ["float32"], ["contiguous"], ["any"], **options)


def test_the_header_says_what_is_computed_where() -> None:
    text = " ".join(exported("left to PyTorch", forward_only=True).split())
    assert "PyTorch computes behind the kernels: cumsum." in text
    assert "Computes min(max(z, 0), 1)." in text
    assert "An average pool moves into the weight" in exported("moved", forward_only=True)
    text = exported("passed tensor")
    assert "In calls with gradients PyTorch computes what follows the convolution" in text
    assert "functional.hardswish(" in text and "from torch.nn import functional\n" in text


@pytest.mark.parametrize(
    ("cpp", "written"),
    [
        ("tconv3d::Product<tconv3d::Value, tconv3d::Sigmoid<tconv3d::Value>>", "z * sigmoid(z)"),
        ("Let<Sum<Value, Vectored<0>>, Choice<Greater<Local<0>, Number<0, 0>>, Local<0>, Number<1, -2>>>",
         "a if (a > 0) else 0.25 with a = z + v0"),
        ("ExpressionList<Whole<0>, ExpressionList<Negative<Value>, NoExpression>>", "t0, -(z)"),
        ("AxisProgram<EachElement<Quotient<Local<1>, Local<0>>>, Then<Reduced<Adding, Value>, Done>>",
         "sum along the axis, and from these the result of every element"),
    ],
)  # fmt: skip
def test_formulas_are_written_for_readers(cpp: str, written: str) -> None:
    assert formula(cpp) == written


@pytest.mark.parametrize("name", CHAINS)
def test_files_read_as_written_by_hand(name: str) -> None:
    """Lines are short, names are used, and what a benchmark's checker searches for is not there."""
    text = exported(name, **({} if name in ("norm", "passed tensor") else {"forward_only": True}))
    tree = ast.parse(text)
    assert not [line for line in text.split("\n") if len(line) > 120]
    functions = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert not [
        each for each in functions if len(re.findall(rf"\b{each}\b", text)) < 2 and not each.startswith("get_")
    ]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert made <= {node.id for node in names if isinstance(node.ctx, ast.Load)}, function.name
    bare = re.sub(r"(#|//).*", "", text)
    assert not re.search(
        r"\bpass\b|\btry\s*:|\bexcept\b|\btorch\.(relu|clamp|softmax|mm|bmm)\b|\bF\.|nn\.functional", bare
    )


@needs_compiler
def test_other_settings_and_modes_are_refused(loaded: Callable[..., ModuleType]) -> None:
    module = loaded("norm", forward_only=True)
    (x,) = module.get_inputs()
    with pytest.raises(ValueError, match=r"'training': False.*: export it with --eval, or without"):
        module.ModelNew(8).eval()(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="does not know autocast"):
        module.ModelNew(8)(x)
    module = loaded("moved", forward_only=True)
    with pytest.raises(ValueError, match=r"exported for .*'scale': 2.0.*, got .*'scale': 3.0"):
        module.ModelNew(8, scale=3.0)(x)
    with pytest.raises(TypeError, match="of one type"):
        model = module.ModelNew(8)
        model.bias.data = model.bias.data.double()
        model(x)


def test_a_model_in_evaluation_mode() -> None:
    """In evaluation a BatchNorm is an affine map, which moves into the weight."""
    text = exported("norm", forward_only=True, evaluated=True)
    assert '"training": False' in text and "batch_norm_running_mean.copy_" not in text
    assert "batch_norm_running_mean.copy_" in exported("norm", forward_only=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", ["pool and softmax", "norm"])
def test_nvcc_compiles_chains_without_a_warning(name: str, tmp_path: Path) -> None:
    """Warnings of unused variables (177), of variables that are only set (550) and of parameters (869) included."""
    tree = ast.parse(exported(name, **({} if name == "norm" else {"forward_only": True})))
    found = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    source = tmp_path / "cuda.cu"
    source.write_text(ast.literal_eval(found["CUDA_SOURCE"]))
    flags = ["-std=c++20", *cpp_extension.COMMON_NVCC_FLAGS, "-gencode=arch=compute_90a,code=sm_90a"]
    flags += [word for number in (177, 550, 869) for word in ("-Xcudafe", f"--diag_warning={number}")]
    words = ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "cuda.o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
