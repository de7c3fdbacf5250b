"""Pages of host memory: large where much is read, given back early, and on the NUMA nodes that serve them best.

Large tensors ask for pages of 2 MB, of which the processor finds many more without a search in memory, and of which
the system has few to hand out: reads in no order of a graph, and results that are new each time, take half the time.

A table that a GPU reads goes to the node that the GPU hangs on, if it has room, as reads of another one also cross the
link between the processors; else, and for tables that CPU cores read, its pages take turns on all nodes, so that none
of them serves all reads. Policies are asked for before pages are touched. Where the system does not let a process ask,
as in some containers, or has one node, or where the process was given a policy, as `numactl` does, pages go where the
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
# Smaller ones would have few whole pages, or none; NumPy asks for its arrays from here on.
_LARGE_BYTES = 4 << 20
_NODES, _STATUS = Path("/sys/devices/system/node"), Path("/proc/self/status")
_DEVICES = Path("/sys/bus/pci/devices")
# Numbers of (mbind, set_mempolicy, get_mempolicy): the C library does not have them, libnuma has.
_CALLS = {"x86_64": (237, 238, 239), "aarch64": (235, 237, 236)}
_PREFERRED, _INTERLEAVE = 1, 3
_MOST_NODES = 1024


def give_back(piece: Tensor) -> None:
    """Give the whole pages of a tensor back to the system; its contents are undefined afterwards."""
    _advise(piece, _DONTNEED)


def use_large_pages(tensor: Tensor) -> Tensor:
    """The tensor, whose memory comes in pages of 2 MB where it is filled only now; for large ones on the CPU.

    No memory is taken beyond its own, and where the system has no such pages nothing changes.
    """
    if not tensor.is_cuda and tensor.numel() * tensor.element_size() >= _LARGE_BYTES:
        _advise(tensor, _HUGEPAGE)
    return tensor


def _advise(tensor: Tensor, advice: int) -> None:
    """Tell the system what is meant with the whole pages of a tensor."""
    # Elsewhere the call is missing, or means something else.
    if sys.platform != "linux":
        return
    page = os.sysconf("SC_PAGE_SIZE")
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end > begin:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def list_nodes() -> tuple[int, ...]:
    """NUMA nodes whose memory this process may use, ascending; empty where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        allowed = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("Mems_allowed_list")]
        known = _parse_list((_NODES / "has_memory").read_text())
        return tuple(sorted(known & _parse_list(allowed[0]) if allowed else known))
    return ()


def _parse_list(text: str) -> set[int]:
    """The numbers of a list such as `0-2,5`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def choose_nodes(num_bytes: int, index: int | None) -> tuple[int, ...]:
    """Nodes for memory of a size: that of GPU `index` if all fits there, else all; empty where there is no choice.

    Args:
        num_bytes: Its size.
        index: The GPU that reads it; None for the CPU.
    """
    nodes = list_nodes()
    if len(nodes) < 2 or not _is_free_to_choose():
        return ()
    near = None if index is None else _node_of_gpu(index)
    return (near,) if near in nodes and num_bytes <= _free_bytes(near) else nodes


def _node_of_gpu(index: int) -> int | None:
    facts: Any = torch.cuda.get_device_properties(index)
    # Some versions of torch do not tell.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return int((_DEVICES / name / "numa_node").read_text())
    return None


def _free_bytes(node: int) -> int:
    """Memory of a node that is free, or that holds pages of files."""
    kinds = ("MemFree:", "Active(file):", "Inactive(file):")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in (_NODES / f"node{node}" / "meminfo").read_text().splitlines()]
        return sum(int(words[3]) * 1024 for words in lines if words[2] in kinds)
    return 0


def put_on(address: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Have pages that were not touched yet come from a node, or in turn from several; whether the system agreed."""
    page = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 1
    begin, end = address // page * page, address + num_bytes
    return bool(nodes) and _ask(0, ctypes.c_void_p(begin), ctypes.c_ulong(end - begin), nodes=nodes, last=(0,))


@contextlib.contextmanager
def allocating_on(nodes: Sequence[int]) -> Iterator[None]:
    """Inside, pages that this thread allocates, also in the driver, come from a node, or in turn from several."""
    if not nodes or not _ask(1, nodes=nodes):
        yield
        return
    try:
        yield
    finally:
        # Nodes are chosen for threads that had no policy.
        _ask(1, nodes=())


def _is_free_to_choose() -> bool:
    """Whether this thread has no policy of its own yet, and may look."""
    calls, policy = _CALLS.get(platform.machine()) if sys.platform == "linux" else None, ctypes.c_int()
    none = (None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return calls is not None and _libc().syscall(calls[2], ctypes.byref(policy), *none) == 0 and policy.value == 0


def _ask(number: int, *first: Any, nodes: Sequence[int], last: tuple[int, ...] = ()) -> bool:
    """Call for a policy: turns among several nodes, one that is preferred, or with none the system's own."""
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
