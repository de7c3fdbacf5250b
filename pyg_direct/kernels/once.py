"""What a compiler does again for every architecture or every call is done once; `jit.py` hands in what to replace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# Code of scalar steps by architecture, function, types of its arguments and name.
_STEPS: dict[tuple[Any, ...], Any] = {}


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object have another attribute for a while."""
    real = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, real)


def lower_once(lower: Callable[..., Any], target: tuple[int, int]) -> Callable[..., Any]:
    """numba-cuda's typing and lowering of a kernel, done for `target` and given for every architecture in a row.

    What NVVM makes code of is the same for all that are supported, but for the architecture in mangled names.
    """
    # The last kernel alone, whose code takes much memory.
    kept = functools.lru_cache(maxsize=1)(functools.partial(lower, cc=target))
    return lambda *args, cc, **options: kept(*args, **options)


def compile_steps_once(compile: Callable[..., Any], target: tuple[int, int]) -> Callable[..., Any]:
    """numba-cuda-mlir's `compile`, which makes machine code of a scalar step for every call of it, and of those that it
    calls: once, and no further than a kernel takes it in.
    """

    def compile_once(dispatcher: Any, sig: Any, abi_info: Any = None, output: Any = None) -> Any:
        if not (abi_info and dispatcher.targetoptions.get("device")):
            return compile(dispatcher, sig, abi_info=abi_info, output=output)
        key = target, dispatcher.py_func, tuple(sig), abi_info["abi_name"]
        if key not in _STEPS:
            _STEPS[key] = dispatcher._compile_device_callee(sig, abi_name=abi_info["abi_name"])
        return _STEPS[key]

    return compile_once
