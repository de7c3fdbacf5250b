"""Loaders, features, files and partitions, opened, used, left and failed for minutes: memory, threads and files stay.

`python -m tests.soak --minutes 10` prints a line every few seconds and exits with 1 if something grew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median_high
from typing import NamedTuple

import torch

from pyg_direct import Feature, LinkNeighborLoader, NeighborLoader, save_rows
from tests.batches import make_data
from tests.fuzz.case import SUBJECTS, Case
from tests.graphs import make_random_graph
from tests.hetero_data import make_hetero

NUM_NODES, NUM_EDGES, WIDTH = 20_000, 200_000, 64
# Random cases of each subject of `tests/fuzz`, which come again and again: new ones would have new kernels compiled.
CASES = 10
# Growth of the medians of quarters that is noise of the allocator.
NOISE_BYTES = 24 << 20
# Of the used memory, only tables of Python grow: the table of its strings by 3.8 MB at once, to 7.7.
NOISE_USED_BYTES = 6 << 20
# Half of the readings of two hours are 3,000.
NOISE_BLOCKS = 10_000
NOISE = {"resident_bytes": NOISE_BYTES, "threads": 0, "files": 0, "gpu_bytes": 0, "system_threads": 0,
         "gpu_taken_bytes": NOISE_BYTES, "used_bytes": NOISE_USED_BYTES, "blocks": NOISE_BLOCKS}  # fmt: skip


class Reading(NamedTuple):
    """Resources of the process: bytes of host memory, threads of Python, open files; bytes of torch's tensors on the
    GPU; threads of the system. Then the used bytes of the GPU, by any program, including graphs and unified memory. Of
    the host memory, also bytes that glibc has given out (0 with other C libraries) and blocks that Python has.
    """

    seconds: float
    resident_bytes: int
    threads: int
    files: int
    gpu_bytes: int
    system_threads: int = 0
    gpu_taken_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost"))  # fmt: skip


def read_used() -> int:
    """Bytes that glibc has given out and not got back; 0 with other C libraries, and before glibc 2.33."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return 0
    read.restype = MallInfo
    found = read()
    return int(found.uordblks + found.hblkhd)


def read_process(start: float, device: str) -> Reading:
    """Read the resources of the process now, after a collection."""
    gc.collect()
    gpu = taken = 0
    if device == "cuda":
        torch.cuda.synchronize()
        gpu = torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        taken = total - free
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Reading(time.monotonic() - start, resident, threading.active_count(), len(os.listdir("/proc/self/fd")), gpu,
                   len(os.listdir("/proc/self/task")), taken, read_used(), sys.getallocatedblocks())  # fmt: skip


class StopError(Exception):
    """Raised by a transform."""


class Work:
    """One round of everything, on graphs that stay."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder, self.random = device, folder, Random(0)
        graph = make_random_graph(NUM_NODES, NUM_EDGES)
        rows = torch.arange(NUM_NODES * WIDTH).view(NUM_NODES, WIDTH).float()
        self.data, self.hetero = make_data(graph, x=rows), make_hetero()
        self.path = save_rows(folder / "rows.npy", rows)
        self.batches = 0
        # Producers take seconds to start: one case of them in all.
        self.cases = [self.draw_case(name) for turn in range(CASES) for name in SUBJECTS
                      if turn == 0 or name != "producers"]  # fmt: skip
        self.next_cases = itertools.cycle(self.cases)

    def draw_case(self, subject: str) -> Case:
        """A random case of a subject."""
        space = SUBJECTS[subject].space(self.device)
        # Producers have one case, which is to make batches.
        drawn = (space.draw(self.random) for _ in itertools.count())
        row = next(row for row in drawn if subject != "producers" or (row is not None and row["seeds"] != "empty"))
        assert row is not None
        return Case(subject, self.device, self.random.getrandbits(32), row)

    def warm_up(self) -> None:
        """Everything once, so that all kernels are compiled and all threads started."""
        # Rows that the system holds no more are read by threads, which stay.
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.round()
        for case in self.cases:
            self.batches += case.run()

    def count(self, batches: object, most: int = 10**9) -> None:
        """Use batches up, or some of them."""
        for _ in itertools.islice(batches, most):
            self.batches += 1

    def load(self) -> None:
        """An epoch to its end, one that is left, one that fails, and the rest of one in another loader."""
        prefetch = self.random.choice([0, 1, 3])
        options = {"batch_size": 512, "shuffle": True, "device": self.device, "prefetch": prefetch, "seed": 1}
        loader = NeighborLoader(self.data, [5, 3], **options, disjoint=self.random.random() < 0.3)
        self.count(loader, 20)
        loader.transform = self.fail_at(3)
        try:
            self.count(loader)
        except StopError:
            loader.transform = None
        else:
            raise AssertionError("the transform did not fail")
        other = NeighborLoader(self.data, [5, 3], **options)
        other.load_state_dict(loader.state_dict())
        self.count(other)

    def fail_at(self, number: int) -> Callable[[object], object]:
        """A transform that fails at a batch."""
        calls = itertools.count()

        def transform(batch: object) -> object:
            if next(calls) == number:
                raise StopError
            return batch

        return transform

    def link(self) -> None:
        """Links with negatives, and batches with types."""
        options = {"batch_size": 256, "device": self.device, "seed": 2}
        self.count(LinkNeighborLoader(self.data, [3], self.data.edge_index[:, :4000], neg_sampling="binary", **options))
        self.count(NeighborLoader(self.hetero, [3, 2], "paper", **options))

    def feature(self) -> None:
        """Rows of a file, some of them in memory, which are written."""
        feature = Feature(device=self.device, device_cache_size="10%", host_cache_size="20%").from_file(self.path)
        written = Feature(device=self.device, device_cache_size="30%").from_cpu_tensor(self.data.x.clone())
        for _ in range(5):
            ids = torch.randint(NUM_NODES, (4000,))
            assert torch.equal(feature[ids].cpu(), self.data.x.cpu()[ids])
            written.update_(ids, feature[ids])
            self.batches += 1

    def fuzz(self) -> None:
        """A case of every subject."""
        for case in itertools.islice(self.next_cases, len(SUBJECTS)):
            self.batches += case.run()

    def round(self) -> None:
        """Everything once."""
        for part in (self.load, self.link, self.feature, self.fuzz):
            part()


def find_growth(readings: list[Reading]) -> list[str]:
    """Return the resources that are larger in the last quarter than in the second, in words; in the first, allocators
    settle.
    """
    quarter = len(readings) // 4
    if quarter == 0:
        return ["too few readings"]
    first, last = readings[quarter : 2 * quarter], readings[-quarter:]
    found = []
    for name, noise in NOISE.items():
        before, after = (median_high([getattr(reading, name) for reading in part]) for part in (first, last))
        if after - before > noise:
            found.append(f"{name} grew from {before:,} to {after:,}")
    return found


def soak(minutes: float, device: str, every_s: float = 10) -> tuple[list[Reading], int]:
    """(readings after the warm-up, batches): rounds until the time is over."""
    readings, due = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        work = Work(device, Path(folder))
        begin = time.monotonic()
        work.warm_up()
        start = time.monotonic()
        print(f"warm after {start - begin:.0f} s", flush=True)
        while time.monotonic() - start < 60 * minutes:
            work.round()
            if time.monotonic() - start >= due:
                readings.append(read_process(start, device))
                due = readings[-1].seconds + every_s
                now = readings[-1]
                print(f"{now.seconds:6.0f} s  {now.resident_bytes / 1e6:7.1f} MB, {now.used_bytes / 1e6:.1f} in use, "
                      f"{now.blocks:,} blocks  {now.threads} threads, "
                      f"{now.system_threads} of the system  {now.files} files  {now.gpu_bytes / 1e6:.1f} MB on GPU, "
                      f"{now.gpu_taken_bytes / 1e6:.1f} taken  {work.batches:,} batches", flush=True)  # fmt: skip
    return readings, work.batches


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="write the readings here, as JSON")
    args = parser.parse_args()
    readings, batches = soak(args.minutes, args.device)
    growth = find_growth(readings)
    if args.out:
        found = {"device": args.device, "minutes": args.minutes, "batches": batches, "growth": growth}
        args.out.write_text(json.dumps({**found, "readings": readings, "names": Reading._fields}, indent=1))
    print("; ".join(growth) if growth else f"{batches:,} batches: nothing grew")
    return 1 if growth else 0


if __name__ == "__main__":
    sys.exit(main())
