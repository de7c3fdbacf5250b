"""Memory and cores of this host: total, free and page-lockable amounts; on any operating system.

`parse_size` reads sizes of caches, as numbers or in words.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
import time
from pathlib import Path

import numpy as np

from pyg_direct.errors import ArgumentError, ArgumentTypeError

# Share of the host memory that is free which copies for GPUs may take.
HOST_SHARE = 0.8
# The part of the time in which freed memory is given back: to touch it anew takes four to five times as much.
_BACK_SHARE = 1e-3
# The largest block that glibc learns from, less what it adds: a page and what tells of the block.
_LARGEST_KEPT = (32 << 20) - (16 << 10)
_MEMINFO, _ZONES = Path("/proc/meminfo"), Path("/proc/zoneinfo")
_GROUP, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Version 1 of control groups tells of no limit by the largest number of pages, in bytes.
_NO_LIMIT = 1 << 62


def total_bytes() -> int:
    """Host memory, no more than which can be had.

    Some virtual machines get memory as they use it, and begin with little: what their kernel knows of, or the limit of
    their container, tells of all.
    """
    return max(_known_bytes(), _present_bytes(), _limit_bytes() or 0)


def available_bytes() -> int:
    """Host memory that can still be had: of the machine, or of the container's or job's limit where that is less.

    Where the limit of the container is more than the machine has yet, the machine grows up to it.
    """
    free = _read_available()
    groups = _list_groups("memory")
    for group in reversed(groups):
        with contextlib.suppress(OSError, ValueError):
            left = _limit_of(group) - _used_bytes(group)
            free = left if group == groups[-1] and _limit_of(group) > _known_bytes() else min(free, left)
    return max(0, free)


def has_room(num_bytes: int, count: int) -> bool:
    """Whether so many copies of so many bytes may be made."""
    return count * num_bytes <= HOST_SHARE * available_bytes()


def give_back_freed() -> None:
    """Let the system have what this process has freed; where the C library is glibc, which else keeps much of it."""
    # Other libraries have no such function, and Windows no such handle.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_blocks() -> None:
    """Let freed blocks of up to 32 MiB wait for the next ones, 64 MiB together: touching new memory takes longer than
    many a loop over it does. glibc else gives back what is more than twice the largest block freed before.
    """
    # Nothing of it is touched. Windows has no such handle.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        allocate, free = library.malloc, library.free
        allocate.argtypes, allocate.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
        free(allocate(_LARGEST_KEPT))


class _GivesBack:
    """Gives back what was freed, in a small part of the time."""

    def __init__(self) -> None:
        self._due = -math.inf

    def __call__(self) -> None:
        """The same as `give_back_freed`, unless that was done so shortly before that it would cost more than its part.

        Each thread of glibc allocates in an arena, which keeps what was freed in it: together they come to hold the
        most that ever was in use in each of them, though hardly anything may be left in any. What is free at the end
        of an arena of threads stays even so.
        """
        if time.monotonic() >= self._due:
            # Not of a clock, which runs on while others have the core.
            begin = time.thread_time()
            give_back_freed()
            self._due = time.monotonic() + (time.thread_time() - begin) / _BACK_SHARE


give_back_now_and_then = _GivesBack()


def count_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than the share of time of its groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _list_groups("cpu"):
        # `max`, or -1 in version 1, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, _read_either(group, ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]))
            if quota > 0:
                cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def page_lock_limit() -> int | None:
    """Bytes that the system lets this process lock (`ulimit -l`); None for no limit, or none that it tells.

    CUDA's page-locked memory does not count, that of network cards does.
    """
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _known_bytes() -> int:
    """What the machine has now."""
    import psutil

    return int(psutil.virtual_memory().total)


def _present_bytes() -> int:
    """What the machine has, with what a host has taken back for a while; 0 where the kernel does not tell."""
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
    """Folders of the control groups that this process is in, its own first: that of all in a container, where that is
    all it sees, or as a scheduler made it for a job; of version 1 where the controller is of that.
    """
    lines: list[list[str]] = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines() if line.count(":") > 1]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    top, own = (_GROUP / controller, paths[controller]) if controller in paths else (_GROUP, paths.get("", "/"))
    # One outside of what a container sees is none of its folders.
    folder = top if ".." in own else top / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _read_either(group: Path, new: list[str], old: list[str]) -> list[str]:
    """The words of the files of version 2 of control groups, or of those of version 1 where it has none of these."""
    names = new if (group / new[0]).exists() else old
    return [word for name in names for word in (group / name).read_text().split()]


def _limit_of(group: Path) -> int:
    """Bytes that a group may take; ValueError where there is no limit, OSError at the top of a machine."""
    limit = int(_read_either(group, ["memory.max"], ["memory.limit_in_bytes"])[0])
    if limit >= _NO_LIMIT:
        raise ValueError("there is no limit")
    return limit


def _limit_bytes() -> int | None:
    """The limit of the container."""
    with contextlib.suppress(OSError, ValueError):
        return _limit_of(_list_groups("memory")[-1])
    return None


def _used_bytes(group: Path) -> int:
    """What a group has taken, without what it can give back at once."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # In version 1 that of the group alone has another name than that of all below it.
    cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return int(_read_either(group, ["memory.current"], ["memory.usage_in_bytes"])[0]) - int(cached)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


def parse_size(size: int | str, whole: int | None = None, name: str = "device_cache_size") -> int:
    """Bytes meant by 1000, `"200M"`, `"0.9G"`, `"3GB"` or, given the `whole` in bytes, `"20%"`.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer, str)):
        raise ArgumentTypeError(f"{name} must be a number of bytes or a string such as '200M', got {size!r}")
    if not isinstance(size, str):
        if size < 0:
            raise ArgumentError(f"{name} must be at least 0, got {size}")
        return int(size)
    share = _SHARE.fullmatch(size)
    if share is not None and whole is not None:
        if float(share[1]) > 100:
            raise ArgumentError(f"{name} must be at most 100%, got {size!r}")
        return int(float(share[1]) / 100 * whole)
    match = _PATTERN.fullmatch(size)
    if match is None:
        like = "1000, '200M', '0.9G' or '3GB'" if whole is None else "1000, '200M', '0.9G', '3GB' or '20%'"
        raise ArgumentError(f"{name} must look like {like}, got {size!r}")
    if whole is not None and size.strip()[-1] in "0123456789." and float(match[1]) > 0:
        # Whoever writes "20" where "20%" may stand hardly means 20 bytes.
        number = size.strip()
        raise ArgumentError(f"{name} must have a unit where it is a string, got {size!r}: write '{number}%', "
                            f"'{number}MB' or '{number}B'")  # fmt: skip
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if num_bytes >= 2**63:
        raise ArgumentError(f"{name} must be less than 2^63 bytes, got {size!r}")
    return int(num_bytes)
