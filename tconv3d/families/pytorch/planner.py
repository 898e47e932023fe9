"""Offers PyTorch's own operator for a forward pass, or for all wanted gradients of a backward pass together.

The plan has no launches: `Plan.aten` tells the executor to call PyTorch. The predicted time comes from times that
`tconv3d calibrate` or `tconv3d bench` has measured. PyTorch chooses among many algorithms, and no simple model
predicts which, so that predictions are off by factors of 2 and more. The file of rates says how far 95% of the
measured times are from their predictions. By prediction alone, PyTorch's operator therefore wins only if it is
predicted to be faster than this library's kernels by more than this factor. An offer whose time nobody has measured
(another type or layout, or a chain of operators) has an infinite time, and wins only if it is timed on the caller's
tensors.

For a layer with a ReLU, or with the statistics of a GroupNorm, the offer is PyTorch's chain of operators for the same
result: convolution, ReLU and, for the statistics, `var_mean`.

This module knows plain data, and never imports PyTorch.
"""

from __future__ import annotations

from functools import partial
from math import inf

from ...planning import calibration
from ...planning.calibration import Work
from ...planning.offers import Answer, Offer, Refusal, Wanted
from ...planning.problem import Device, Pass, Plan

KERNEL = "pytorch"


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    """Returns one offer for all wanted passes, because times of whole calls are what has been measured."""
    passes = tuple(wanted)
    if any(problem.batch == 0 for problem in wanted.values()):
        return [Refusal(KERNEL, passes, "there is nothing to compute")]
    kind = kind_of(wanted)
    make = partial(Plan, KERNEL, _why(wanted), (), tile="PyTorch's choice", aten=True)
    return [
        Offer(
            KERNEL,
            passes,
            wanted[passes[0]],
            device,
            partial(work, wanted, device),
            make,
            kind=kind,
            surcharge=calibration.largest_error(KERNEL, kind, device) or inf,
        )
    ]


def kind_of(wanted: Wanted) -> str:
    """Returns the kind of the rates: gradients of input and weight together are a kind of their own."""
    matrix: list[Pass] = [which for which in wanted if which is not Pass.BIAS_GRAD]
    matrix = matrix or list(wanted)
    kind = calibration.kind_of(wanted[matrix[0]])
    return kind if len(matrix) == 1 else f"backward,{kind.partition(',')[2]}"


def work(wanted: Wanted, device: Device) -> Work:
    """Returns the work of a call; infinite cycles if there are no rates for such a call."""
    chain = any(problem.relu or problem.norm for problem in wanted.values())
    if chain or not calibration.has_rates(KERNEL, kind_of(wanted), device):
        return Work(cycles=inf)
    return counted(wanted)


def counted(wanted: Wanted) -> Work:
    """Returns the products of all passes."""
    return Work(products=sum(p.flops / 2 for which, p in wanted.items() if which is not Pass.BIAS_GRAD))


def _why(wanted: Wanted) -> str:
    problem = next(iter(wanted.values()))
    chain = ["convolution", *(["ReLU"] if problem.relu else []), *(["var_mean"] if problem.norm else [])]
    return "PyTorch's own operator" if len(chain) == 1 else f"PyTorch's own operators: {', '.join(chain)}"
