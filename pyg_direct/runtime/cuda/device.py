"""CUDA driver and devices: calls with every return code checked, the choice of the device, and its abilities."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pyg_direct.errors import ArgumentError, ArgumentTypeError, CudaError, DeviceError
from pyg_direct.typing import Device


@functools.cache
def load_driver() -> Any:
    """Return the module `cuda.bindings.driver`, initialized."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            "device='cuda' needs the CUDA bindings: pip install '.[cu13]' (or [cu12]) in the clone of pyg_direct; "
            f"importing cuda.bindings failed with: {error}"
        ) from error
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:
        raise DeviceError(f"device='cuda' needs a CUDA driver, and none was found: {error}") from error
    if int(code) != 0:
        raise DeviceError(f"device='cuda' needs a working CUDA driver; cuInit returned {code.name}")
    _keep_garbage_in_children()
    return driver


def _keep_garbage_in_children() -> None:
    """Let no forked child collect unused objects of this process.

    Among them may be tensors that other streams have read. Torch would ask the driver about these streams, which fails
    in a child and ends it, such as a worker of a `DataLoader`.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)


def call(name: str, *args: Any) -> Any:
    """Call a driver function; returns its result (a tuple for several, None for none)."""
    driver = load_driver()
    code, *results = getattr(driver, name)(*args)
    if code:
        raise CudaError(name, int(code), code.name, describe(code))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def describe(code: Any) -> str:
    """Return the driver's own sentence for an error code."""
    driver = load_driver()
    error, text = driver.cuGetErrorString(code)
    return text.decode() if not int(error) and text else "no description"


@contextlib.contextmanager
def tolerate_captures() -> Iterator[None]:
    """Let this thread free memory and wait although a capture is under way, by this package or by a user.

    For finalizers, which the garbage collector may run at any time: by default such calls end a capture of their thread
    with an error.
    """
    driver = load_driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def advise(address: int, num_bytes: int, advice: str, index: int, node: int | None = None) -> None:
    """Advise the driver on unified memory: `cudaMemAdvise...`, GPU `index` or at -1 the CPU, or a NUMA node of it."""
    driver = load_driver()
    value = getattr(driver.CUmem_advise, "CU_MEM_ADVISE" + re.sub("([A-Z])", r"_\1", advice).upper())
    location = driver.CUmemLocation()
    kinds = driver.CUmemLocationType
    location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if index < 0 else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = max(index, 0)
    if index < 0 and node is not None:
        location.type, location.id = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, node
    name = "cuMemAdvise_v2" if hasattr(driver, "cuMemAdvise_v2") else "cuMemAdvise"
    call(name, address, num_bytes, value, location)


# torch keeps an index in a byte and lets larger ones wrap around.
_MOST_GPUS = 127


# GPUs that are there: to ask again takes as long as a launch.
_FOUND: set[torch.device] = set()


def resolve_device(device: Device = None) -> torch.device:
    """Return the device that an argument names; `None` is the current GPU, or the CPU if there is no GPU."""
    if type(device) is torch.device and device in _FOUND:
        return device
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise ArgumentTypeError(f"device must be a torch.device, a name or a GPU index, got {device!r}")
    try:
        resolved = torch.device("cuda", min(device, _MOST_GPUS)) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device must name a torch device, got {device!r}") from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ArgumentError(f"device must be a CPU or a CUDA device, got {device!r}")
    shown = device if isinstance(device, int) else repr(str(device))
    if not torch.cuda.is_available():
        raise DeviceError(f"device={shown} asks for a GPU, but torch.cuda.is_available() is False here: leave device "
                          "out to use the CPU, or run `pyg-direct doctor`")  # fmt: skip
    index = device if isinstance(device, int) else resolved.index
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device={shown} asks for GPU {index}, but there are {torch.cuda.device_count()}")
    found = torch.device("cuda", index)
    _FOUND.add(found)
    return found


class Abilities(NamedTuple):
    """Abilities of a GPU that decide which memory can hold its rows, and how kernels share a multiprocessor."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    managed_without_migration: bool
    reads_pageable_memory: bool
    driver_version: int
    shared_bytes: int


@functools.cache
def abilities(index: int) -> Abilities:
    """Read the abilities of GPU `index` from the driver."""
    driver = load_driver()
    attribute = driver.CUdevice_attribute
    device = call("cuDeviceGet", index)

    def read(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return Abilities(
        compute_capability=(read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=read("MULTIPROCESSOR_COUNT"),
        managed_without_migration=bool(read("CONCURRENT_MANAGED_ACCESS")),
        reads_pageable_memory=bool(read("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")),
        driver_version=int(call("cuDriverGetVersion")),
        shared_bytes=read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
    )


@functools.cache
def _primary_context(index: int) -> Any:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


def bind_thread(index: int) -> bool:
    """Give this thread torch's context on GPU `index` if it has none: torch only does so at its own first call.

    Returns:
        True if it had none.
    """
    has_none = int(call("cuCtxGetCurrent")) == 0
    if has_none:
        call("cuCtxSetCurrent", _primary_context(index))
    return has_none


def count_allocated(device: int | torch.device) -> tuple[int, int, int]:
    """Return bytes of a GPU that tensors hold, the most that they held, and bytes that torch has reserved from the
    driver.

    These are the numbers of `torch.cuda.memory_allocated` and its like; each of those calls lists all counters of
    torch, which takes a quarter of a millisecond.
    """
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = counts["allocated_bytes"]["all"]
    return allocated["current"], allocated["peak"], counts["reserved_bytes"]["all"]["current"]


def free_bytes(index: int) -> int:
    """Return bytes of GPU memory that a new tensor could get: free in the driver plus cached by torch. If the process
    may use only a share (`torch.cuda.set_per_process_memory_fraction`), at most the rest of it.
    """
    free, total = torch.cuda.mem_get_info(index)
    allocated, _, reserved = count_allocated(index)
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return max(0, min(free + reserved, allowed) - allocated)


# Memory that matrix products take before a model does: on a Hopper GPU 32 MiB forward and as much backward.
_WORKSPACES = 128 << 20


def budget_of(free: int) -> int:
    """Return bytes of `free` GPU memory that graph data may take by default. A quarter stays free for the model, at
    least 8 GiB but at most half; at least the 128 MiB that libraries take.
    """
    return free - max(free // 4, min(8 << 30, free // 2), min(_WORKSPACES, free))
