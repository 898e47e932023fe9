"""Runs a few test files with the oldest PyTorch that pyproject.toml allows, on a machine without a GPU.

    python tests/oldest_torch.py            all of its test files
    python tests/oldest_torch.py --short    those that `make test` runs

A machine that cannot download this PyTorch, without a network or in time, skips the tests with a message.

The oldest PyTorch is installed into a temporary directory, in front of the one that this Python has. It cannot be
imported without CUDA's libraries, which are larger than PyTorch itself. Tests without a GPU call nothing in them, so
stubs take their place: libraries with the wanted names and symbols, whose functions return 100, "no CUDA device".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = ("tests/api/test_modules.py", "tests/torch_ops/test_flops.py", "tests/torch_ops/test_transforms.py")
TESTS = (
    *SHORT,
    *(f"tests/api/test_{name}.py" for name in ("accelerate", "compiling", "forwards", "fuse", "fusing", "graphs")),
    "tests/distributed/test_rules.py",
    "tests/tails/test_recording.py",
)
DOWNLOAD_SECONDS = 120  # for the download and installation of a wheel of 0.9 GB


def oldest() -> str:
    """The oldest release that the package allows, as a requirement: torch==2.9.0."""
    (found,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return f"torch=={found}" + ".0" * (2 - found.count("."))


def install(requirement: str, target: Path) -> bool:
    """Installs a requirement alone into a directory. Tells whether that could be done in time."""
    options = ["--quiet", "--no-deps", "--no-cache-dir", "--no-compile", "--target", str(target)]
    options += ["--retries", "1", "--timeout", "20", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    try:
        return (
            subprocess.run(command, timeout=DOWNLOAD_SECONDS, stderr=subprocess.DEVNULL, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def write_stubs(folder: Path) -> list[str]:
    """Puts a stub for every CUDA library that is missing beside the libraries of PyTorch that need it."""
    libraries = [str(path) for path in sorted(folder.glob("*.so"))]
    needed = subprocess.run(["ldd", *libraries], capture_output=True, text=True, check=False).stdout
    missing = sorted(set(re.findall(r"(\S+) => not found", needed)))
    names = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    symbols = set(re.findall(r" U (_*(?:cu|nccl|nvrtc|nvshmem)\w+)(?:@(\S+))?$", names.stdout, re.MULTILINE))
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol, version in sorted(symbols):
        versions[version].append(symbol)
    script = "".join(f"{version} {{ {'; '.join(found)}; }};\n" for version, found in versions.items() if version)
    with tempfile.TemporaryDirectory() as work:
        source, versioned = Path(work, "stub.c"), Path(work, "stub.map")
        source.write_text("".join(f"long {symbol}(void) {{ return 100; }}\n" for symbol, _ in sorted(symbols)))
        versioned.write_text(script)
        for library in missing:
            options = ["-w", "-fno-builtin", "-fPIC", "-shared", f"-Wl,-soname,{library}"]
            options += [f"-Wl,--version-script={versioned}", "-o", str(folder / library)]
            subprocess.run(["gcc", *options, str(source)], check=True)
    return missing


def main(arguments: list[str]) -> int:
    short = "--short" in arguments
    requirement = oldest()
    with tempfile.TemporaryDirectory() as directory:
        if not install(requirement, Path(directory)):
            print(f"skipped: {requirement} cannot be installed here")
            return 0
        stubs = write_stubs(Path(directory, "torch", "lib"))
        print(f"{requirement} with {len(stubs)} stubs for CUDA libraries")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{directory}:{ROOT}"}
        version = "import torch; print(torch.__version__)"
        loaded = subprocess.run(
            [sys.executable, "-c", version], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if not loaded.stdout.startswith(requirement.removeprefix("torch==")):
            print(f"expected {requirement}, and got {loaded.stdout or loaded.stderr}", file=sys.stderr)
            return 1
        some = SHORT if short else (*TESTS, "--numprocesses=2")
        tests = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *some]
        return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
