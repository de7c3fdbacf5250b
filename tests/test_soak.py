"""What the soak calls growth, and one round of what it does."""

import threading

import pytest

from tests.soak import NOISE_BYTES, Reading, Work, find_growth, read_process


def readings(resident=lambda n: 10**9, threads=lambda n: 5, files=lambda n: 9, system=lambda n: 20,
             taken=lambda n: 10**10):  # fmt: skip
    return [Reading(10.0 * n, resident(n), threads(n), files(n), 0, system(n), taken(n)) for n in range(40)]


@pytest.mark.parametrize(("series", "grown"), [
    ({}, ""),
    # Noise, and what settles in the first quarter.
    ({"resident": lambda n: 10**9 + n % 7 * NOISE_BYTES // 8}, ""),
    ({"resident": lambda n: 10**9 - max(0, 10 - n) * NOISE_BYTES}, ""),
    ({"resident": lambda n: 10**9 + n * NOISE_BYTES // 10}, "resident_bytes grew from 1,"),
    ({"threads": lambda n: 5 + n // 30}, "threads grew from 5 to 6"),
    ({"files": lambda n: 9 + n // 20}, "files grew from 9 to 10"),
    ({"system": lambda n: 20 + n // 30}, "system_threads grew from 20 to 21"),
    ({"taken": lambda n: 10**10 + n % 3 * NOISE_BYTES // 4}, ""),
    ({"taken": lambda n: 10**10 + n * NOISE_BYTES // 10}, "gpu_taken_bytes grew from 10,"),
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
