"""`use_backend`, a function and a context manager, chooses which implementation runs.

The choice belongs to the calling thread, like PyTorch's grad mode. A backward pass runs on the backend of its forward
pass, whichever thread autograd uses.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, get_args

import torch

Backend = Literal["auto", "cuda", "emulator", "torch"]


class _State(threading.local):
    backend: Backend = "auto"


_state = _State()


def current_backend() -> Backend:
    return _state.backend


def _leave_compiled_code() -> None:
    """Ends the graph of a compiled function, because operators before and after this point use different backends.

    Every operator looks up the backend when it runs.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="tconv3d.use_backend() ends the graph of a compiled function")


class use_backend:
    """Chooses what runs `conv_transpose3d` and the modules, for this thread.

    - ``"auto"``: CUDA tensors run this library's kernels, CPU tensors PyTorch's operator.
    - ``"cuda"``: this library's kernels, or an error that says why not.
    - ``"emulator"``: CPU tensors run through the CUDA kernels in the emulator. Slow: for tests and debugging.
    - ``"torch"``: PyTorch's operator.

    >>> use_backend("torch")                # from now on
    >>> with use_backend("emulator"): ...   # within the block

    A compiled function (torch.compile) ends its graph where the choice changes, and raises with fullgraph=True. A
    compiled backward pass runs on the backend that is chosen when it runs.
    """

    def __init__(self, backend: Backend) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"expected one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}")
        _leave_compiled_code()
        self._previous = _state.backend
        self._backend = backend
        _state.backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave_compiled_code()
        _state.backend = self._previous

    def __repr__(self) -> str:
        return f"use_backend({self._backend!r})"
