"""Rates of the disk under a file, and the gaps between rows that are read along by them."""

import errno
import os
import threading

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import ArgumentError, FileError
from pyg_direct.features import disk_rates
from pyg_direct.features.disk_rates import PAGE, DiskRates, choose_gap, find_block, find_rates, measure_disk
from pyg_direct.features.row_files import RowFile

# Of a disk of a cloud, of a fast local one, and of one that turns.
CLOUD, FAST, TURNING = DiskRates(1e9, 6e4), DiskRates(7e9, 1e6), DiskRates(1.5e8, 100)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_rates, "_KNOWN", {})
    return RowFile(save_rows(tmp_path / "rows.npy", torch.zeros(3000, 1000, dtype=torch.uint8)))


def find_read(begins, ends, gap, unit):
    """Bytes that are read, and requests, if gaps up to `gap` units are read along; row by row."""
    units, requests, last = 0, 0, None
    for begin, end in zip(begins, ends, strict=True):
        if last is None or begin > last + gap:
            units, requests, last = units + end - begin, requests + 1, end
        elif end > last:
            units, last = units + end - last, end
    return units * unit, requests


def make_units(share, unit, row_bytes=512, count=4000):
    rows = np.flatnonzero(np.random.default_rng(0).random(count) < share)
    return rows * row_bytes // unit, -(-(rows + 1) * row_bytes // unit)


@pytest.mark.parametrize("rates", [CLOUD, FAST, TURNING], ids=["cloud", "fast", "turning"])
@pytest.mark.parametrize("unit", [512, PAGE])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.4, 0.9])
def test_the_chosen_gap_is_the_best_of_all(rates, unit, share):
    begins, ends = make_units(share, unit)
    num_bytes = 512 * len(begins)

    gap = choose_gap(begins, ends, unit, num_bytes, rates)

    found = [find_read(begins, ends, own, unit) for own in range(disk_rates._MOST_GAP // unit + 1)]
    costs = [num_read + requests * rates.request_bytes for num_read, requests in found]
    shortest = min(costs)
    expected = next(own for own, cost in enumerate(costs) if cost <= 1.1 * shortest)
    if found[expected][0] > 2.5 * num_bytes:
        short = [own for own, cost in enumerate(costs) if cost <= 1.3 * shortest]
        expected = max((own for own in short if found[own][0] <= 2.5 * num_bytes), default=min(short))
    assert gap == expected


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.25, 0.5])
def test_a_fast_disk_reads_at_most_two_and_a_half_times_the_rows(share):
    begins, ends = make_units(share, 512, count=20_000)

    gap = choose_gap(begins, ends, 512, 512 * len(begins), FAST)

    assert find_read(begins, ends, gap, 512)[0] <= 2.5 * 512 * len(begins)


def test_a_disk_with_few_requests_a_second_reads_wide_gaps():
    begins, ends = make_units(0.1, 512)

    gaps = [choose_gap(begins, ends, 512, 512 * len(begins), rates) for rates in (FAST, CLOUD, TURNING)]

    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[2]


def test_one_row_has_no_gap():
    assert choose_gap(np.array([3]), np.array([4]), 512, 512, CLOUD) == 0


def test_rates_are_measured_once_for_a_file_system(file, monkeypatch):
    calls = []
    monkeypatch.setattr(disk_rates, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(disk_rates, "measure_disk", lambda own: calls.append(own) or CLOUD)

    assert [find_rates(file), find_rates(file)] == [CLOUD, CLOUD]
    assert calls == [file]


def test_a_short_file_is_not_measured(file, monkeypatch):
    monkeypatch.setattr(disk_rates, "measure_disk", None)

    assert find_rates(file) is None


def test_rates_are_measured(file):
    rates = measure_disk(file)

    assert min(rates) > 0
    assert rates.request_bytes > 0


def test_a_disk_that_fails_has_no_rates(file, monkeypatch):
    monkeypatch.setattr(disk_rates, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(disk_rates, "read_file_ranges_cpu", lambda *args: 0)

    assert find_rates(file) is None
    assert disk_rates._KNOWN == {}


def test_a_disk_that_hangs_is_named_with_the_byte(file, monkeypatch):
    go_on = threading.Event()

    def hang(handle, offset, rows, *args):
        # An empty call compiles the loop.
        return go_on.wait() and 0 if len(rows) > 0 else 0

    monkeypatch.setattr(disk_rates, "read_file_ranges_cpu", hang)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.2")
    try:
        with pytest.raises(FileError, match=r"rows.npy gave no bytes for 0.2 seconds, at byte \d+: check the disk"):
            measure_disk(file)
    finally:
        go_on.set()


@pytest.mark.parametrize("count", [1, 5, 100])
def test_short_files_are_measured_for_reports(tmp_path, count):
    file = RowFile(save_rows(tmp_path / "rows.npy", torch.zeros(count, 100, dtype=torch.uint8)))

    assert min(measure_disk(file)) > 0


def test_a_file_system_that_refuses_small_blocks_is_read_by_pages(file, monkeypatch):
    def refuse(handle, targets, place):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    assert find_block(file) in (512, PAGE)
    monkeypatch.setattr(os, "preadv", refuse)
    assert find_block(file) == PAGE


@pytest.mark.parametrize("given", ["abc", "0", "-1", "nan"])
def test_a_wrong_timeout_is_named(monkeypatch, given):
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", given)

    with pytest.raises(ArgumentError, match=f"PYG_DIRECT_DISK_TIMEOUT must be a number .* above 0, got {given!r}"):
        disk_rates.read_timeout()


def test_an_empty_timeout_is_the_default(monkeypatch):
    monkeypatch.delenv("PYG_DIRECT_DISK_TIMEOUT", raising=False)
    default = disk_rates.read_timeout()
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "")

    assert disk_rates.read_timeout() == default
