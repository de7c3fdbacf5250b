"""How much memory the host has left."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_bytes() -> int:
    """Host memory that can still be had: of the machine, or of the container's limit where that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        free = min(free, int((folder / "memory.max").read_text()) - used)
    return max(0, free)
