"""Launches are timed in turns, on a core that is awake, and told beside the driver's own call."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import launch as launch_file
from benchmarks.launch import launch_by_torch
from pyg_direct.bench import launch
from pyg_direct.bench.launch import make_rows, time_in_turns


def test_ways_take_turns_from_another_one_on_each_time():
    calls = []

    took = time_in_turns({way: lambda way=way: calls.append(way) for way in "abc"}, count=2, repeats=3)

    assert "".join(calls) == "abc" + "aabbcc" + "bbccaa" + "ccaabb"
    assert {way: len(micros) for way, micros in took.items()} == {"a": 3, "b": 3, "c": 3}


def test_what_is_told_is_the_time_of_one_call():
    took = time_in_turns({"slow": lambda: time.sleep(1e-3), "fast": int}, count=5, repeats=2)

    assert min(took["slow"]) >= 1000
    assert min(took["fast"]) < min(took["slow"])


def test_the_core_works_before_each_way(monkeypatch):
    awake = []
    monkeypatch.setattr(launch, "wake_core", lambda seconds=0.5: awake.append(seconds))

    time_in_turns({"a": int, "b": int}, count=1, repeats=4)

    assert awake[0] == 0.5
    assert len(awake) == 1 + 2 * 4
    assert min(awake) > 0


def test_each_way_stands_beside_the_driver():
    took = {"the driver alone": [4.0, 5.0, 6.0], "ours": [5.0, 5.5, 7.0]}

    total, added = make_rows(took, count=10)

    assert (total.case, total.p50, total.limit) == ("launch/ours", 5.5, 5.0)
    assert (added.p20, added.p50, added.p80) == pytest.approx((0.5, 1.0, 1.0))
    assert "3 times 10 launches on a core kept awake" in total.note


@pytest.mark.parametrize("does", ["right", "wrong", "nothing it knows"])
def test_torchs_launcher_is_timed_where_it_does_the_same(monkeypatch, does):
    items, out, given = torch.arange(8), torch.zeros(8, dtype=torch.int64), []

    def launch_kernel(function, x, y, z, warps, shared, kinds, values, stream):
        if does == "nothing it knows":
            raise TypeError("other arguments")
        given.append((function, kinds, values))
        if does == "right":
            out.copy_(items + 5)

    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", SimpleNamespace(_launch_kernel=launch_kernel), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(launch_file, "run_gpu", lambda kernel, grid, *args: out.copy_(items + 5))

    call = launch_by_torch(77, (7, items, 3, out))

    assert (call is not None) == (does == "right")
    for function, kinds, values in given:
        array = [0, 0, 8, 8, items.data_ptr(), 8, 8], [0, 0, 8, 8, out.data_ptr(), 8, 8]
        assert (function, list(values)) == (77, [7, *array[0], 3, *array[1]])
        assert kinds == "K" + "KKllKll" + "l" + "KKllKll"


def test_without_torchs_launcher_nothing_is_timed(monkeypatch):
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher", raising=False)

    assert launch_by_torch(77, (7, torch.arange(8), 0, torch.zeros(8))) is None
