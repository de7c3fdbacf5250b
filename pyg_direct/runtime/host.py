"""How much host memory there is, for this process."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that new allocations of this process may take: free and reclaimable ones, and no more than a container's
    limit leaves.
    """
    limits = [_read_meminfo()]
    most, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if most is not None and used is not None:
        limits.append(max(0, most - used))
    return min(limits)


def _read_meminfo() -> int:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
