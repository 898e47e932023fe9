"""Loads exported files without a GPU: the emulator and the headers of `tools/fake_cuda` in place of load_inline."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from places import ROOT

from tconv3d import emulator
from tconv3d.runtime import cache, sources

FAKE = ROOT / "tests" / "tools" / "fake_cuda"


def load_emulated(directory: Path) -> Callable[..., ModuleType]:
    """What load_inline does, with the host's compiler and the emulator for everything."""

    def load(name: str, cpp_sources: list[str], cuda_sources: list[str], **options: Any) -> ModuleType:
        defines = [flag for flag in options["extra_cflags"] if flag.startswith("-D")]
        assert set(defines) <= set(options["extra_cuda_cflags"])
        bound = "".join(f'm.def("{f}", torch::wrap_pybind_function({f}));' for f in options["functions"])
        host = f"{''.join(cpp_sources)}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ {bound} }}\n"
        kernels = build("".join(cuda_sources), kernel_flags(defines), shared=True)
        place = directory / hashlib.sha256(kernels).hexdigest()[:16]
        place.mkdir(exist_ok=True)
        library = place / f"lib{place.name}.so"  # a name of its own: the loader knows libraries by their names
        library.write_bytes(kernels)
        (place / "host.o").write_bytes(build(host, host_flags(defines), shared=False))
        pytorch = Path(torch.__file__).parent / "lib"
        files = [
            place / "host.o",
            library,
            *(pytorch / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch_python")),
        ]
        files += [f"-Wl,-rpath,{place}:{pytorch}"]
        emulator._run(emulator._compiler(), "-shared", "-o", place / "exported.so", *files)
        # pybind11 knows modules by their full names, Python finds the function to call by the last part.
        return load_file(f"{place.name}.exported", place / "exported.so")

    return load


def load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def kernel_flags(defines: list[str]) -> list[str]:
    flags = [flag for flag in emulator._FLAGS if flag not in ("-fno-exceptions", "-fvisibility=hidden")]
    flags += ["-Og", "-fno-gnu-unique"]  # constants of the same name in two libraries are not the same
    return [*flags, f"-I{FAKE}", f"-I{emulator._INCLUDE}", "-include", str(emulator._HEADER), *defines]


def host_flags(defines: list[str]) -> list[str]:
    include = Path(torch.__file__).parent / "include"
    places = (FAKE, include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    name = "-DTORCH_EXTENSION_NAME=exported"
    return ["-std=c++20", "-fPIC", "-O0", name, *defines, *(f"-I{place}" for place in places)]


def build(source: str, flags: list[str], shared: bool) -> bytes:
    """A library with the emulator's runtime in it, or an object file; kept in the disk cache."""
    cxx = emulator._compiler()

    def compiled() -> bytes:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "source.cpp").write_text(source)
            (directory / "runtime.o").write_bytes(emulator._runtime(cxx))
            how = ["-shared", str(directory / "runtime.o")] if shared else ["-c"]
            emulator._run(cxx, *flags, "-o", directory / "out", directory / "source.cpp", *how)
            return (directory / "out").read_bytes()

    versions = (torch.__version__, emulator._version(cxx))
    files = {path.name: path for place in (FAKE, emulator._HERE) for path in place.rglob("*.*") if path.is_file()}
    return cache.get(cache.key(sources.digest(files), source, *versions, *flags), ".so", compiled)
