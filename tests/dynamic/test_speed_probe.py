"""Speeds of a device for snapshots are measured once, alone, whatever other work the machine does."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from pyg_direct.dynamic import speed_probe
from pyg_direct.dynamic.speed_probe import find_speeds, level
from pyg_direct.ops.snapshots import aggregate
from tests.dynamic.test_group_tuner import SPEEDS


@pytest.mark.slow
def test_speeds_are_measured_once(device, monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))
    for sizes in ("_NODES", "_EDGES", "_PRODUCTS", "_MANY"):
        monkeypatch.setattr(f"pyg_direct.dynamic.speed_probe.{sizes}", {device.type: 10_000})
    read = partial(torch.cuda.get_rng_state, device) if device.type == "cuda" else torch.get_rng_state
    state = read()

    speeds = find_speeds(device)

    assert find_speeds(device) == speeds
    # The probe's draws leave the draws of a script with its own seed unchanged.
    assert torch.equal(read(), state)
    assert all(seconds > 0 for row in speeds.seconds_of_edge for seconds in row)
    assert speeds.call_seconds > 0
    assert (speeds.bytes_per_second > 0) == speeds.is_queued == (device.type == "cuda")
    expected = ([2, 2], [4, 4]) if device.type == "cuda" else ([], [])
    assert ([*map(len, speeds.scan_seconds)], [*map(len, speeds.scan_csr_seconds)]) == expected
    assert [[*map(len, table)] for table in speeds.factors] == ([[5] * 7] * 3 if device.type == "cuda" else [])
    assert all(factor > 0 for table in speeds.factors for row in table for factor in row)


def test_what_was_measured_beside_other_work_is_leveled():
    assert level([[1, 9, 3], [2, 2, 4], [5, 4, 8]]) == [[1, 2, 3], [2, 2, 4], [4, 4, 8]]


def test_calls_of_a_sequence_are_not_awaited_one_by_one(monkeypatch):
    # The device is done 5 s after it was asked, the host asks for something every 1 s.
    clock, done = [0.0], [0.0]

    def ask():
        clock[0] += 1
        done[0] = max(done[0], clock[0] + 4)

    def wait(work, device):
        begin = clock[0]
        work()
        clock[0] = max(clock[0], done[0])
        return clock[0] - begin

    monkeypatch.setattr(speed_probe, "time_call", wait)

    assert speed_probe._time(ask, torch.device("cpu")) == 5
    assert speed_probe._time_in_turn(ask, torch.device("cpu"), 16) == (16 + 4) / 16


@pytest.mark.parametrize("values", ["ones", "shared", "stacked"])
def test_what_whole_groups_take_is_told_of_the_device_alone(values, monkeypatch):
    monkeypatch.setattr(speed_probe, "_TRIED_NODES", 200)
    monkeypatch.setattr(aggregate, "MANY_NUMBERS", 1)
    # Each plan takes a second on the clock of this device, and runs.
    monkeypatch.setattr(speed_probe, "_time_behind", lambda work, device, count: (work(), 1.0)[1])

    quick, slow = (speed_probe._measure_factors(replace(SPEEDS, csr_seconds=seconds), values, torch.device("cpu"))
                   for seconds in (0.0, 1.0))  # fmt: skip

    assert [len(row) for row in quick] == [5] * 7
    assert quick == slow
    # More was expected of wider rows, and a second is a smaller part of it.
    assert all(row == tuple(sorted(row, reverse=True)) for row in quick)
