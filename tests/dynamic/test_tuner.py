"""Groups are chosen by what they share, and the choice is the best of all that nest."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.dynamic.tuner import Speeds, choose_groups, expect_options, find_speeds
from pyg_direct.ops.overlap import unite
from tests.dynamic.test_stream import make_list

# An edge costs as much as its row is wide from 16 numbers on, and launches little.
SPEEDS = Speeds((4e-11, 4e-11, 4e-11, 16e-11, 64e-11), 1e-6, 5e10)


def make_keys(count, change, size=100_000):
    keys = torch.arange(size)
    return [torch.cat([keys[: int(size * (1 - change))], size * (t + 1) + keys[: int(size * change)]])
            for t in range(count)]  # fmt: skip


def test_all_that_is_shared_is_read_once():
    (option,) = choose_groups(make_keys(8, 0.0), 16, SPEEDS)

    assert (option.last - option.first, option.overlap_rate) == (8, 1)
    assert option.seconds < 4 * choose_groups(make_keys(1, 0.0), 16, SPEEDS)[0].seconds


def test_what_shares_nothing_is_not_read_for_others():
    options = choose_groups(make_keys(8, 1.0), 16, SPEEDS)

    # As wide as one snapshot: apart, or as exclusives in one structure, which saves launches.
    assert all(option.form == "split" or option.last - option.first == 1 for option in options)
    apart = 8 * choose_groups(make_keys(1, 0.0), 16, SPEEDS)[0].seconds
    assert sum(option.seconds for option in options) <= apart


def test_memory_bounds_groups():
    options = choose_groups(make_keys(8, 0.0), 1, SPEEDS, first=16, largest=3)

    assert [(option.first, option.last) for option in options] == [(16, 18), (18, 20), (20, 22), (22, 24)]


@given(count=st.integers(1, 8), change=st.floats(0, 1), channels=st.integers(1, 64))
def test_choice_is_the_best_of_all_nested_ones(count, change, channels):
    keys = make_keys(count, change, 1000)
    cheapest = {}
    for first, size in itertools.product(range(count), (1, 2, 4, 8)):
        last = min(first + size, count)
        if first % size == 0:
            part = keys[first:last]
            options = expect_options(unite(part), sum(map(len, part)), channels, first, SPEEDS)
            cheapest[first, last] = min(option.seconds for option in options)

    def best(first, last):
        if last - first == 1:
            return cheapest[first, last]
        half = 1
        while 2 * half < last - first:
            half *= 2
        return min(cheapest[first, last], best(first, first + half) + best(first + half, last))

    chosen = choose_groups(keys, channels, SPEEDS)

    assert sum(option.seconds for option in chosen) == pytest.approx(best(0, count))
    assert [option.first for option in chosen] == [0, *(option.last for option in chosen[:-1])]


@pytest.mark.slow
def test_speeds_are_measured_once(device, monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path))

    speeds = find_speeds(device)

    assert find_speeds(device) == speeds
    assert all(seconds > 0 for seconds in speeds.seconds_of_width)
    assert (speeds.bytes_per_second > 0) == (device.type == "cuda")
    assert speeds.per_edge(8) == pytest.approx((speeds.seconds_of_width[1] * speeds.seconds_of_width[2]) ** 0.5)
    assert speeds.per_edge(512) == pytest.approx(2 * speeds.seconds_of_width[-1])


def test_choices_are_told(monkeypatch):
    monkeypatch.setattr("pyg_direct.dynamic.plan.find_speeds", lambda device: SPEEDS)
    given, layer = stream(make_list(8), "cpu"), TGCN(3, 4)

    for snapshot in given:
        layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

    summary = given.plan.summary()
    assert "snapshots 0 to 7" in summary
    assert "overlap" in summary
