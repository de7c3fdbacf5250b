"""Memory and cores of this host: total, free and page-lockable amounts; on any operating system.

`parse_size` reads sizes of caches, as numbers or in words. `allocating_on` chooses the NUMA nodes of pages. A table
that a GPU reads goes to the GPU's own node if it has room. Reads from another node also cross the link between the
processors. Otherwise, and for tables that CPU cores read, its pages are interleaved over all nodes, so that none serves
all reads. Policies are set before pages are touched. They are not set if the system forbids them, as in some
containers, or has one node. A policy of the process, as from `numactl`, is kept too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, warn

# Share of the free host memory that copies for GPUs may take.
HOST_SHARE = 0.8
# Largest share of the time that returning freed memory may take: touching it again takes four to five times as long.
_BACK_SHARE = 1e-3
# The largest block that glibc adapts its threshold to, less its overhead: a page and the header of the block.
_LARGEST_KEPT = (32 << 20) - (16 << 10)
_MEMINFO, _ZONES = Path("/proc/meminfo"), Path("/proc/zoneinfo")
_GROUP, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Version 1 of control groups reports no limit as the largest number of pages, in bytes.
_NO_LIMIT = 1 << 62


def total_bytes() -> int:
    """Return host memory in bytes, at most as much as can be allocated.

    Some virtual machines start with little memory and grow as they use it. Their kernel's maximum, or the limit of
    their container, then gives the total.
    """
    return max(_known_bytes(), _present_bytes(), _limit_bytes() or 0)


def available_bytes() -> int:
    """Return host memory that can still be allocated: of the machine, or of the container's or job's limit if that is
    less.

    If the limit of the container is above the present memory of the machine, the machine grows up to it.
    """
    free = _read_available()
    groups = _list_groups("memory")
    for group in reversed(groups):
        with contextlib.suppress(OSError, ValueError):
            left = _limit_of(group) - _used_bytes(group)
            free = left if group == groups[-1] and _limit_of(group) > _known_bytes() else min(free, left)
    return max(0, free)


def has_room(num_bytes: int, count: int) -> bool:
    """Report whether the host can hold so many copies of so many bytes."""
    return count * num_bytes <= HOST_SHARE * available_bytes()


def give_back_freed() -> None:
    """Return memory that this process has freed to the system; glibc alone otherwise keeps much of it."""
    # Other libraries have no such function, and Windows no such handle.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_blocks() -> None:
    """Keep freed blocks of up to 32 MiB for the next ones, 64 MiB together. Touching new memory takes longer than many
    a loop over it. By default glibc returns free memory beyond twice the largest block freed before.
    """
    # Its memory is not touched. Windows has no such handle.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        allocate, free = library.malloc, library.free
        allocate.argtypes, allocate.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
        free(allocate(_LARGEST_KEPT))


class _GivesBack:
    """Caller of `give_back_freed` that uses a small part of the time."""

    def __init__(self) -> None:
        self._due = -math.inf

    def __call__(self) -> None:
        """Call `give_back_freed`, unless the last call was so recent that this one would exceed its share of the time.

        Each thread of glibc allocates in an arena, which keeps the memory freed in it. Together the arenas come to hold
        the peak of each, even if hardly any of it is in use. Free memory at the end of a thread's arena stays even
        after this call.
        """
        if time.monotonic() >= self._due:
            # CPU time: a clock runs on while others have the core.
            begin = time.thread_time()
            give_back_freed()
            self._due = time.monotonic() + (time.thread_time() - begin) / _BACK_SHARE


give_back_now_and_then = _GivesBack()


def count_cores() -> int:
    """Return the cores that this process may use: those it is bound to, within its control groups' share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _list_groups("cpu"):
        # `max`, or -1 in version 1, if there is no limit.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, _read_either(group, ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]))
            if quota > 0:
                cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def page_lock_limit() -> int | None:
    """Return bytes that the system lets this process lock (`ulimit -l`); None for no limit, or if the system does not
    report one.

    CUDA's page-locked memory does not count, but memory of network cards does.
    """
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _known_bytes() -> int:
    """Return the present memory of the machine."""
    import psutil

    return int(psutil.virtual_memory().total)


def _present_bytes() -> int:
    """Return the memory of the machine, also what its host has reclaimed for a while; 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in _ZONES.read_text().splitlines())
        return sum(int(words[1]) for words in lines if words[:1] == ["present"]) * mmap.PAGESIZE
    return 0


def _read_available() -> int:
    if not _MEMINFO.exists():
        import psutil

        return int(psutil.virtual_memory().available)
    lines = _MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _list_groups(controller: str) -> list[Path]:
    """Return folders of the control groups of this process, its own first. In a container without sight of others this
    is the group of the container; a scheduler may have made one for a job. They are of version 1 if the controller is.
    """
    lines: list[list[str]] = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines() if line.count(":") > 1]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    top, own = (_GROUP / controller, paths[controller]) if controller in paths else (_GROUP, paths.get("", "/"))
    # A group outside the container's view has no folder.
    folder = top if ".." in own else top / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _read_either(group: Path, new: list[str], old: list[str]) -> list[str]:
    """Read the words of the files of control groups version 2, or of version 1 if there are none."""
    names = new if (group / new[0]).exists() else old
    return [word for name in names for word in (group / name).read_text().split()]


def _limit_of(group: Path) -> int:
    """Return bytes that a group may take; ValueError without a limit, OSError at the top of a machine."""
    limit = int(_read_either(group, ["memory.max"], ["memory.limit_in_bytes"])[0])
    if limit >= _NO_LIMIT:
        raise ValueError("there is no limit")
    return limit


def _limit_bytes() -> int | None:
    """Return the limit of the container."""
    with contextlib.suppress(OSError, ValueError):
        return _limit_of(_list_groups("memory")[-1])
    return None


def _used_bytes(group: Path) -> int:
    """Return bytes that a group has taken, without memory that it can free at once."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # In version 1 the value of the group alone has another name than the value of its subtree.
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return int(_read_either(group, ["memory.current"], ["memory.usage_in_bytes"])[0]) - int(cached)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# A number up to here may be one of percent or gigabytes; a row of 25 floats has as many bytes.
_FEW_BYTES = 100
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def check_size(size: int | float | str, name: str = "device_cache_size", *, most: float = 100) -> None:
    """Check the size of a cache as a caller gives it, and warn about a number that hardly means bytes.

    Args:
        size: A size for `parse_size`, including a share.
    """
    # A fraction is refused, with the share that it means.
    num_bytes = parse_size(size, 0, name, most=most)  # type: ignore[arg-type]
    if not isinstance(size, str) and 0 < num_bytes <= _FEW_BYTES:
        warn(f"{name}={num_bytes} means {num_bytes} bytes, fewer than most rows have: write '{num_bytes}%' for a "
             f"share, '{num_bytes}MB' or '{num_bytes}GB' for that much memory, or '{num_bytes}B' for bytes",
             LoaderWarning)  # fmt: skip


def parse_size(size: int | str, whole: int | None = None, name: str = "device_cache_size", *,
               most: float = 100) -> int:  # fmt: skip
    """Return the bytes meant by 1000, `"200M"`, `"0.9G"`, `"3GB"` or, given the `whole` in bytes, `"20%"`.

    Args:
        size: Bytes, or words for them.
        whole: Bytes that a share refers to; None if no share may be given.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer, str)):
        raise ArgumentTypeError(f"{name} must be a number of bytes or a string such as '200M', got {size!r}"
                                f"{_guess_meant(size, whole)}")  # fmt: skip
    if not isinstance(size, str):
        if size < 0:
            raise ArgumentError(f"{name} must be at least 0, got {size}")
        return int(size)
    share = _SHARE.fullmatch(size)
    if share is not None and whole is not None:
        if float(share[1]) > most:
            raise ArgumentError(f"{name} must be at most {most:g}%, got {size!r}")
        return int(float(share[1]) / 100 * whole)
    match = _PATTERN.fullmatch(size)
    if match is None:
        like = "1000, '200M', '0.9G' or '3GB'" if whole is None else "1000, '200M', '0.9G', '3GB' or '20%'"
        raise ArgumentError(f"{name} must look like {like}, got {size!r}")
    if whole is not None and size.strip()[-1] in "0123456789." and float(match[1]) > 0:
        # If a percentage is allowed, "20" hardly means 20 bytes.
        number = size.strip()
        percent = f"{100 * float(number):g}" if float(number) < 1 else number
        raise ArgumentError(f"{name} must have a unit where it is a string, got {size!r}: write '{percent}%', "
                            f"'{number}MB' or '{number}B'")  # fmt: skip
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if num_bytes >= 2**63:
        raise ArgumentError(f"{name} must be less than 2^63 bytes, got {size!r}")
    return int(num_bytes)


def _guess_meant(size: object, whole: int | None) -> str:
    """Guess the size meant by a fraction or a float, to end an error message."""
    if isinstance(size, bool) or not isinstance(size, (float, np.floating)) or not math.isfinite(size):
        return ""
    if 0 < size <= 1:
        return "" if whole is None else f": write '{100 * float(size):g}%' for a share"
    return f": write {int(size)} for bytes" if size > 1 else ""


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
    """Make pages that this thread or the driver allocates in the block come from a node, or from several in turn."""
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
