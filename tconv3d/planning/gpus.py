"""Lists GPUs by name with their peak rates, and lets plans be made for one GPU on another."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from .problem import Device, Pass, Problem


@dataclass(frozen=True)
class Gpu:
    """Describes a device with its peak rates: `copy` in TB/s of memory traffic, the others in TFLOP/s."""

    device: Device
    copy: float
    float32: float
    tf32: float
    half: float
    float64: float
    source: str

    def floor_ms(self, problem: Problem) -> float:
        """Returns the larger of the times for moving every tensor once and for the arithmetic at peak rate."""
        moving = problem.bytes / (self.copy * 1e12)
        return 1e3 * max(moving, problem.flops / (self.rate(problem) * 1e12))

    def rate(self, problem: Problem) -> float:
        if problem.dtype == "float64":
            return self.float64
        if problem.which is Pass.BIAS_GRAD:
            return self.float32
        if problem.dtype == "float32":
            # Strict float32 takes multiply-adds, or three TF32 products for each product.
            return self.tf32 if problem.tf32 else max(self.float32, self.tf32 / 3)
        return self.half


GPUS = {
    gpu.device.name: gpu
    for gpu in (
        # Rates of the H200 were measured with a device-to-device copy and matrix products of 8192^3, except float64,
        # which is from the data sheet.
        Gpu(Device("H200", (9, 0), 132, 232448), 4.27, 51.3, 389.0, 789.0, 67.0, "measured"),
        # Rates of all other GPUs are from NVIDIA's data sheets: memory bandwidth, and dense rates (without the factor
        # of 2 for structured sparsity) that accumulate in float32. A name without a form factor means the SXM module.
        # Shared memory per block is what CUDA allows for the compute capability: 227 KB for 9.0 and 10.0, 163 KB for
        # 8.0, 99 KB for 8.6, 8.9 and 12.0. `find` takes the first GPU listed for a compute capability.
        Gpu(Device("H100", (9, 0), 132, 232448), 3.35, 67.0, 494.0, 989.0, 67.0, "data sheet"),
        Gpu(Device("H100 PCIe", (9, 0), 114, 232448), 2.0, 51.0, 378.0, 756.0, 51.0, "data sheet"),
        Gpu(Device("H20", (9, 0), 78, 232448), 4.0, 44.0, 74.0, 148.0, 1.0, "data sheet"),
        Gpu(Device("A100", (8, 0), 108, 166912), 2.04, 19.5, 156.0, 312.0, 19.5, "data sheet"),
        Gpu(Device("RTX 3090", (8, 6), 82, 101376), 0.94, 35.6, 35.6, 71.0, 0.56, "data sheet"),
        Gpu(Device("A10", (8, 6), 72, 101376), 0.6, 31.2, 62.5, 125.0, 0.49, "data sheet"),
        Gpu(Device("A6000", (8, 6), 84, 101376), 0.77, 38.7, 77.4, 154.8, 0.6, "data sheet"),
        Gpu(Device("L40S", (8, 9), 142, 101376), 0.86, 91.6, 183.0, 362.0, 1.4, "data sheet"),
        Gpu(Device("L4", (8, 9), 58, 101376), 0.3, 30.3, 60.0, 121.0, 0.47, "data sheet"),
        Gpu(Device("RTX 4090", (8, 9), 128, 101376), 1.01, 82.6, 82.6, 165.0, 1.3, "data sheet"),
        Gpu(Device("B200", (10, 0), 148, 232448), 8.0, 80.0, 1100.0, 2250.0, 40.0, "data sheet"),
        Gpu(Device("GB200", (10, 0), 152, 232448), 8.0, 80.0, 1250.0, 2500.0, 40.0, "data sheet"),
        Gpu(Device("RTX 5090", (12, 0), 170, 101376), 1.79, 104.8, 104.8, 209.5, 1.6, "data sheet"),
    )
}

DEFAULT_GPU = "H200"
AS = "TCONV3D_AS"  # the environment variable that names the GPU to plan for
TOLD = " as "  # between the names of the present GPU and of the GPU to plan for


def find(name: str) -> Gpu:
    """Returns the GPU with a name, whatever its case, or the first GPU with a compute capability ("9.0").

    The name may be the one that the driver gives ("NVIDIA A100-SXM4-80GB").
    """
    if not isinstance(name, str):
        raise TypeError(
            f"expected gpu to be a name or a compute capability as text (gpu='H200', gpu='9.0'), but got {name!r} of "
            f"type {type(name).__name__}"
        )
    for wanted, of in ((_plain(name), _name), (name.strip(), _capability)):
        for gpu in GPUS.values():
            if of(gpu) == wanted:
                return gpu
    if (by_driver := known(Device(name, (0, 0), 0, 0))) is not None:
        return by_driver
    raise ValueError(f"expected a GPU of {names()}, got {name!r}")


def device_named(text: str) -> Device:
    """Returns the device of a GPU's name or compute capability, optionally with its multiprocessors: "H100,114"."""
    if not isinstance(text, str):
        find(text)  # raises
    name, _, multiprocessors = text.partition(",")
    if multiprocessors and not multiprocessors.strip().isdigit():
        raise ValueError(f"expected a GPU and a number of multiprocessors (A100,108), got {text!r}")
    device = find(name).device
    return replace(device, multiprocessors=int(multiprocessors)) if multiprocessors else device


def known(device: Device) -> Gpu | None:
    """Returns the listed GPU with the driver's name of a device ("NVIDIA A100-SXM4-80GB"), or None.

    A listed name must appear in the driver's name as whole words, and the longest such name counts: an "NVIDIA H100
    PCIe" is no H100 module, and an "NVIDIA L40" is no L4. A device that is told to be another one (`as_told`) is what
    it really is. Laptop GPUs share the names of desktop GPUs and are not listed.
    """
    words = _words(device.name.partition(TOLD)[0])
    if "laptop" in words:
        return None
    text = f" {' '.join(words)} "
    found = [gpu for name, gpu in GPUS.items() if f" {' '.join(_words(name))} " in text]
    return max(found, key=lambda gpu: len(gpu.device.name), default=None)


def names() -> str:
    """Lists in words the names and compute capabilities that `find` takes."""
    capabilities = sorted({gpu.device.capability for gpu in GPUS.values()})
    return ", ".join((*GPUS, *(f"{major}.{minor}" for major, minor in capabilities)))


def _name(gpu: Gpu) -> str:
    return _plain(gpu.device.name)


def _capability(gpu: Gpu) -> str:
    major, minor = gpu.device.capability
    return f"{major}.{minor}"


def _plain(name: str) -> str:
    """Returns a name in lower case, without spaces, dashes, underscores, "nvidia" and "geforce"."""
    return "".join(word for word in _words(name) if word not in ("nvidia", "geforce"))


def _words(name: str) -> list[str]:
    return name.casefold().replace("-", " ").replace("_", " ").split()


def as_told(device: Device) -> Device:
    """Returns the device to plan for: the given one, or the one that the environment variable TCONV3D_AS names.

    TCONV3D_AS is a GPU's name or a compute capability, optionally followed by a number of multiprocessors: "A100",
    "8.0", "A100,108". The default is the number of multiprocessors of `device`, so that plans fill the present GPU.
    Kernels are always compiled for the present GPU, and never use more shared memory per block than it has.
    """
    told = os.environ.get(AS, "")
    if not told:
        return device
    name, _, multiprocessors = told.partition(",")
    if multiprocessors and not multiprocessors.strip().isdigit():
        raise ValueError(f"{AS}: expected a GPU and a number of multiprocessors (A100,108), got {told!r}")
    other = find(name).device
    return replace(
        other,
        name=f"{device.name}{TOLD}{other.name}",
        multiprocessors=int(multiprocessors or device.multiprocessors),
        shared_bytes=min(other.shared_bytes, device.shared_bytes),
        runs_on=device.compiled_capability,
    )
