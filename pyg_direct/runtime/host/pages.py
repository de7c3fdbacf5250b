"""Pages of host memory: large ones for frequent reads, early release, and the NUMA nodes that serve them best.

Large tensors request pages of 2 MB: the processor's TLB covers more memory, and the system has fewer pages to map.
Random reads of a graph, and results that are new each time, take half the time.

A table that a GPU reads goes to the GPU's own NUMA node if it has room. Reads from another node also cross the link
between the processors. Otherwise, and for tables that CPU cores read, its pages are interleaved over all nodes, so that
none serves all reads. Policies are set before pages are touched. They are not set if the system forbids them, as in
some containers, or has one node. A policy of the process, as from `numactl`, is kept too. Pages then go wherever the
system puts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DONTNEED, _HUGEPAGE = 4, 14
# Smaller tensors would have few whole pages, or none; NumPy requests them for its arrays from this size on.
_LARGE_BYTES = 4 << 20
_NODES, _STATUS = Path("/sys/devices/system/node"), Path("/proc/self/status")
_DEVICES = Path("/sys/bus/pci/devices")
# System call numbers of (mbind, set_mempolicy, get_mempolicy): libnuma wraps them, the C library does not.
_CALLS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}
_PREFERRED, _INTERLEAVE = 1, 3
_MOST_NODES = 1024


def give_back(piece: Tensor) -> None:
    """Return the whole pages of a tensor to the system; its contents are undefined afterwards."""
    _advise(piece, _DONTNEED)


def use_large_pages(tensor: Tensor) -> Tensor:
    """Return the tensor, with memory in pages of 2 MB if it is not filled yet; for large ones on the CPU.

    It takes no additional memory; if the system has no such pages, there is no effect.
    """
    if not tensor.is_cuda and tensor.numel() * tensor.element_size() >= _LARGE_BYTES:
        _advise(tensor, _HUGEPAGE)
    return tensor


def _advise(tensor: Tensor, advice: int) -> None:
    """Give the system advice about the whole pages of a tensor."""
    # On other systems the call is missing, or has another meaning.
    if sys.platform != "linux":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end > begin:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def list_nodes() -> tuple[int, ...]:
    """Return the NUMA nodes whose memory this process may use, ascending; empty if the system does not report them."""
    with contextlib.suppress(OSError, ValueError):
        allowed = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("Mems_allowed_list")]
        known = _parse_list((_NODES / "has_memory").read_text())
        return tuple(sorted(known & _parse_list(allowed[0]) if allowed else known))
    return ()


def _parse_list(text: str) -> set[int]:
    """Return the numbers of a list such as `0-2,5`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def choose_nodes(num_bytes: int, index: int | None) -> tuple[int, ...]:
    """Choose nodes for memory of a size: the node of GPU `index` if all fits there, otherwise all nodes; empty if there
    is no choice.

    Args:
        index: The GPU that reads it; None for the CPU.
    """
    nodes = list_nodes()
    if len(nodes) < 2 or not _is_free_to_choose():
        return ()
    near = None if index is None else _node_of_gpu(index)
    return (near,) if near in nodes and num_bytes <= _free_bytes(near) else nodes


def _node_of_gpu(index: int) -> int | None:
    facts: Any = torch.cuda.get_device_properties(index)
    # Some versions of torch do not report it.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return int((_DEVICES / name / "numa_node").read_text())
    return None


def _free_bytes(node: int) -> int:
    """Return memory of a node that is free, or that holds pages of files."""
    kinds = ("MemFree:", "Active(file):", "Inactive(file):")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in (_NODES / f"node{node}" / "meminfo").read_text().splitlines()]
        return sum(int(words[3]) * 1024 for words in lines if words[2] in kinds)
    return 0


def put_on(address: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Make untouched pages come from a node, or in turn from several; return True if the system agreed."""
    page = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 1
    begin, end = address // page * page, address + num_bytes
    return bool(nodes) and _ask(0, ctypes.c_void_p(begin), ctypes.c_ulong(end - begin), nodes=nodes, last=(0,))


@contextlib.contextmanager
def allocating_on(nodes: Sequence[int]) -> Iterator[None]:
    """Make pages that this thread allocates in the block, also in the driver, come from a node, or in turn from
    several.
    """
    if not nodes or not _ask(1, nodes=nodes):
        yield
        return
    try:
        yield
    finally:
        # Nodes are chosen for threads that had no policy.
        _ask(1, nodes=())


def _is_free_to_choose() -> bool:
    """Report whether this thread has no policy of its own yet, and may read it."""
    calls, policy = _CALLS.get(platform.machine()) if sys.platform == "linux" else None, ctypes.c_int()
    none = (None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return calls is not None and _libc().syscall(calls[2], ctypes.byref(policy), *none) == 0 and policy.value == 0


def _ask(number: int, *first: Any, nodes: Sequence[int], last: tuple[int, ...] = ()) -> bool:
    """Set a policy: interleaving over several nodes, one preferred node, or without nodes the system's default."""
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return False
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    policy = 0 if not nodes else _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    rule = (policy, mask, ctypes.c_ulong(_MOST_NODES)) if nodes else (policy, None, ctypes.c_ulong(0))
    return bool(_libc().syscall(calls[number], *first, *rule, *last) == 0)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
