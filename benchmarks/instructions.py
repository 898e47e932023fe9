"""Counts the machine instructions of the kernels on mma.sync and bounds their time, without a GPU.

    python benchmarks/instructions.py --nvdisasm PATH
    python benchmarks/instructions.py gan_256_128_8 --kinds tf32 --passes forward --layouts contiguous --nvdisasm PATH

The kernels `mma` and `tensor_weight_grad` of each layer are planned for `--gpu` (told to have `--multiprocessors`
multiprocessors), compiled for `--arch` and disassembled. The table has one line for each kernel: instructions per
matrix instruction (HMMA) of its loop by kind, registers, bytes spilled, warps per multiprocessor, and lower bounds of
the time by tensor cores, shared memory, issue slots, L2 and stores, at `--ghz` GHz. Loops without matrix instructions
inside the main loop (copies) are counted by the model of the planner instead, because their number of rounds is not
known to the disassembler. `nvdisasm` is part of the CUDA toolkit and of the package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.weight_grad import warps
from tconv3d.planning import gpus
from tconv3d.planning.launch import Launch
from tconv3d.planning.problem import Device, Pass, Problem
from tconv3d.runtime import compiler
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.precision import LAYOUTS
from tconv3d.tools.bench.problems import problems_of_layer

# Kinds of machine instructions by the beginnings of their names; other instructions count as "other".
KINDS = {
    "mma": ("HMMA",),
    "ldsm": ("LDSM",),
    "lds": ("LDS",),
    "sts": ("STS",),
    "copy": ("LDGSTS", "LDGDEPBAR", "DEPBAR"),
    "global": ("LDG", "STG"),
    "round": ("FSETP", "FSEL", "F2F", "F2FP", "SEL"),
    "shift": ("PRMT", "SHF", "LOP3"),
    "integer": ("IADD", "IMAD", "LEA", "ISETP", "MOV", "VIADD", "IMNMX", "VIMNMX", "UIADD", "ULEA", "UMOV", "R2UR"),
    "branch": ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET"),
    "barrier": ("BAR", "WARPSYNC", "ERRBAR", "MEMBAR"),
}
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
PASSES = {Pass.FORWARD: "forward", Pass.INPUT_GRAD: "input_grad", Pass.WEIGHT_GRAD: "weight_grad"}


@dataclass(frozen=True)
class Loop:
    """Describes the loop with the most matrix instructions: counts by kind, without loops that have none."""

    counts: Counter[str]
    copying: int  # instructions of inner loops without matrix instructions, one round of each

    def each(self, kind: str) -> float:
        """Returns the instructions of a kind for each matrix instruction."""
        return self.counts[kind] / max(1, self.counts["mma"])

    @property
    def all(self) -> float:
        return sum(self.counts.values()) / max(1, self.counts["mma"])


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), "other")


def loop_of(text: str) -> Loop:
    """Finds the main loop in a disassembly."""
    names: list[str] = []
    targets: list[tuple[int, str] | None] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(names)
        elif found := INSTRUCTION.match(line):
            target = TARGET.search(found[3])
            targets.append((len(names), target[1]) if found[2].startswith("BRA") and target else None)
            names.append(found[2])
    backward = [(labels[t[1]], t[0] + 1) for t in targets if t and labels.get(t[1], len(names)) <= t[0]]

    def products(span: tuple[int, int]) -> int:
        return sum(name.startswith("HMMA") for name in names[slice(*span)])

    outer = max(backward, key=lambda span: (products(span), span[0] - span[1]), default=(0, len(names)))
    inner = [s for s in backward if outer[0] <= s[0] and s[1] <= outer[1] and s != outer and products(s) == 0]
    skipped = {i for span in inner for i in range(*span)}
    kept = Counter(kind_of(names[i]) for i in range(*outer) if i not in skipped)
    return Loop(kept, len(skipped))


def disassembled(launch: Launch, arch: str, nvdisasm: str) -> tuple[str, compiler.Report]:
    made = compiler.compile(launch.kernel, launch.constants, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.cubin)
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return text, made.report


def bounds_of(problem: Problem, device: Device, loop: Loop) -> dict[str, float]:
    """Returns lower bounds of the cycles of the launch, by the unit of a multiprocessor that is busy so long."""
    if problem.which is Pass.WEIGHT_GRAD:
        tensor, shared, _, l2, latency = warps.parts(problem, device)
        multiplies, predicted = 4 * tensor / warps.CYCLES_PER_MULTIPLY, warps.cycles(problem, device)
        stores = latency
    else:
        found = mma_planner.chosen(problem, device)
        assert found is not None
        rounds = found.grid * found.tiles_of_block / device.multiprocessors
        tensor, shared, _, l2, stores = (rounds * part for part in found.parts())
        multiplies, predicted = rounds * found.multiplies, found.cycles(device)
    issue = loop.all * multiplies / 4
    return {"tensor": tensor, "shared": shared, "issue": issue, "L2": l2, "stores": stores, "predicted": predicted}


def planned(problem: Problem, device: Device) -> Launch | None:
    """Returns the launch of the kernel on mma.sync, or None if the family refuses the problem."""
    family = warps if problem.which is Pass.WEIGHT_GRAD else mma_planner
    if family.why_not(problem, device) is not None:
        return None
    return next(
        each for each in family.plan(problem, device).launches if each.kernel in ("mma", "tensor_weight_grad")
    )


COLUMNS = ("ldsm", "lds", "sts", "copy", "round", "shift", "integer", "branch", "barrier", "other", "global")


def line_of(problem: Problem, device: Device, options: argparse.Namespace) -> str:
    launch = planned(problem, device)
    if launch is None:
        return "refused"
    text, report = disassembled(launch, options.arch, options.nvdisasm)
    loop = loop_of(text)
    blocks = dict(launch.constants)["kMinBlocks"]
    assert isinstance(blocks, int)
    bounds = bounds_of(problem, device, loop)
    milliseconds = {name: cycles / (options.ghz * 1e6) for name, cycles in bounds.items()}
    binding = max((name for name in bounds if name != "predicted"), key=lambda name: bounds[name])
    counts = " ".join(f"{loop.each(kind):7.2f}" for kind in COLUMNS)
    return (
        f"{loop.counts['mma']:5} {loop.all:6.2f} {counts} {loop.copying:5} {report.registers:4} "
        f"{report.spill_loads + report.spill_stores:5} {launch.threads // 32 * blocks:3} {launch.shared_bytes:6} "
        f"{launch.grid[0]:6} " + " ".join(f"{ms:7.4f}" for ms in milliseconds.values()) + f" {binding}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--nvdisasm", default="nvdisasm", help="the disassembler")
    parser.add_argument("--gpu", default="A100", choices=gpus.GPUS)
    parser.add_argument("--multiprocessors", type=int, default=132, help="those of the GPU that is told to be --gpu")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--ghz", type=float, default=1.755, help="clock rate; 1.755 is an H200's under load")
    parser.add_argument("--kinds", nargs="*", default=["tf32", "bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["contiguous"], choices=LAYOUTS)
    parser.add_argument("--passes", nargs="*", default=list(PASSES.values()), choices=PASSES.values())
    options = parser.parse_args()
    device = replace(gpus.GPUS[options.gpu].device, multiprocessors=options.multiprocessors)
    print(
        f"{'layer':20} {'kind':8} {'pass':11} {'mma':>5} {'all':>6} " + " ".join(f"{c:>7}" for c in COLUMNS), end=""
    )
    print(" loops regs spill wps  bytes blocks | tensor  shared   issue      L2  stores predicted (ms)  binds")
    for name, kind, layout in product(options.layers, options.kinds, options.layouts):
        for problem in problems_of_layer(LAYERS[name], kind, layout):
            if PASSES.get(problem.which) in options.passes:
                line = line_of(problem, device, options)
                print(f"{name:20} {kind:8} {PASSES[problem.which]:11} {line}", flush=True)


if __name__ == "__main__":
    main()
