"""CUDA driver through `cuda.bindings`, with every return code checked, and advice about unified memory."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

from pyg_direct.errors import CudaError, DeviceError


@functools.cache
def load_driver() -> Any:
    """Return the module `cuda.bindings.driver`, initialized.

    Raises:
        DeviceError: the bindings are not installed, or this machine has no CUDA driver.
    """
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
    return driver


def call(name: str, *args: Any) -> Any:
    """Call a driver function; returns its result (a tuple for several, None for none).

    Raises:
        CudaError: the driver returned an error code.
    """
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
    """Advise the driver on unified memory: `advice` as in `cudaMemAdvise...`, about GPU `index` or, at -1, the CPU, of
    which it may be one NUMA node.
    """
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
