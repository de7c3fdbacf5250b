"""Growth as the soak reports it, and one round of its work."""

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.soak import NOISE_BYTES, Reading, Work, find_growth, read_process, read_used


def readings(resident=lambda n: 10**9, threads=lambda n: 5, files=lambda n: 9, system=lambda n: 20,
             taken=lambda n: 10**10, used=lambda n: 10**8, blocks=lambda n: 10**6):  # fmt: skip
    return [Reading(10.0 * n, resident(n), threads(n), files(n), 0, system(n), taken(n), used(n), blocks(n))
            for n in range(40)]  # fmt: skip


@pytest.mark.parametrize(("series", "grown"), [
    ({}, ""),
    # Noise, and values that settle in the first quarter.
    ({"resident": lambda n: 10**9 + n % 7 * NOISE_BYTES // 8}, ""),
    ({"resident": lambda n: 10**9 - max(0, 10 - n) * NOISE_BYTES}, ""),
    ({"resident": lambda n: 10**9 + n * NOISE_BYTES // 10}, "resident_bytes grew from 1,"),
    ({"threads": lambda n: 5 + n // 30}, "threads grew from 5 to 6"),
    ({"files": lambda n: 9 + n // 20}, "files grew from 9 to 10"),
    ({"system": lambda n: 20 + n // 30}, "system_threads grew from 20 to 21"),
    ({"taken": lambda n: 10**10 + n % 3 * NOISE_BYTES // 4}, ""),
    ({"taken": lambda n: 10**10 + n * NOISE_BYTES // 10}, "gpu_taken_bytes grew from 10,"),
    # A table of Python grows once.
    ({"used": lambda n: 10**8 + n // 30 * 3_800_000}, ""),
    ({"used": lambda n: 10**8 + n * 400_000}, "used_bytes grew from 10"),
    ({"blocks": lambda n: 10**6 + n * 300}, ""),
    ({"blocks": lambda n: 10**6 + n * 600}, "blocks grew from 1,"),
])  # fmt: skip
def test_growth_is_told(series, grown):
    assert "; ".join(find_growth(readings(**series))).startswith(grown)
    assert bool(find_growth(readings(**series))) == bool(grown)


def test_a_round_leaves_threads_and_files_as_they_were(tmp_path):
    work = Work("cpu", tmp_path)
    work.round()
    before = read_process(0, "cpu")

    work.load()
    work.link()
    work.feature()

    after = read_process(0, "cpu")
    assert work.batches > 100
    assert after.files == before.files
    assert after.system_threads >= after.threads
    # Readers of files stay, and start as they are needed.
    assert not any(thread.name.startswith("pyg_direct_batch") for thread in threading.enumerate())


def test_producers_of_a_soak_make_batches(tmp_path):
    (case,) = (case for case in Work("cpu", tmp_path).cases if case.subject == "producers")

    assert case.run() > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_memory_in_use_is_counted_wherever_it_was_given_out():
    before = read_used()
    rows = torch.ones(10_000_000)
    pieces = [torch.ones(10_000) for _ in range(1000)]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: [torch.ones(10_000) for _ in range(1000)]).result()
    held = read_used()
    del rows, pieces, others
    gc.collect()

    assert held - before == pytest.approx(120_000_000, rel=0.05)
    assert read_used() - before < 5_000_000
