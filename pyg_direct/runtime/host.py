"""How much memory this host has and how much of it is free, and how many cores; on any operating system."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from pathlib import Path

# Share of the host memory that is free which copies for GPUs may take.
HOST_SHARE = 0.8
# The part of the time in which freed memory is given back: to touch it anew takes four to five times as much.
_BACK_SHARE = 1e-3
# The largest block that glibc learns from, less what it adds: a page and what tells of the block.
_LARGEST_KEPT = (32 << 20) - (16 << 10)
_MEMINFO, _ZONES = Path("/proc/meminfo"), Path("/proc/zoneinfo")
_GROUP, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
    for group in reversed(_list_groups()):
        with contextlib.suppress(OSError, ValueError):
            left = _limit_of(group) - _used_bytes(group)
            free = left if group == _GROUP and _limit_of(group) > _known_bytes() else min(free, left)
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
    for group in _list_groups():
        # `max` where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
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


def _list_groups() -> list[Path]:
    """Folders of the control groups that this process is in, its own first: that of all in a container, where that is
    all it sees, or as a scheduler made it for a job.
    """
    own = ""
    with contextlib.suppress(OSError):
        own = next((line[len("0::/") :] for line in _OWN.read_text().splitlines() if line.startswith("0::/")), "")
    # One outside of what a container sees is none of its folders.
    folder = _GROUP if ".." in own else _GROUP / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_GROUP))]


def _limit_of(group: Path) -> int:
    """Bytes that a group may take; ValueError where there is no limit, OSError at the top of a machine."""
    return int((group / "memory.max").read_text())


def _limit_bytes() -> int | None:
    """The limit of the container."""
    with contextlib.suppress(OSError, ValueError):
        return _limit_of(_GROUP)
    return None


def _used_bytes(group: Path) -> int:
    """What a group has taken, without what it can give back at once."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
