"""Launches that differ in few arguments give the results of launches with all of them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops import run_kernel as ops
from pyg_direct.ops.run_kernel import prepare_gpu
from pyg_direct.ops.sampling.draw_random import draw_bits
from pyg_direct.runtime.cuda.launch import OPEN
from pyg_direct.runtime.cuda.memory import allocate

gpu_or_sim = pytest.mark.sim if SIMULATED else pytest.mark.gpu
DEVICE = "cpu" if SIMULATED else "cuda"


@gpu_or_sim
def test_every_call_reads_its_own_arguments():
    launch = prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN)

    for count in (3, 5, 1, 8):
        items = torch.arange(count, device=DEVICE) + count
        out = torch.zeros_like(items)
        launch(1, (items, out))
        assert torch.equal(out, draw_bits(items, key=7))


@pytest.mark.gpu
def test_streams_and_threads_launch_beside_each_other():
    launch, results = prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN), {}

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # Late items show a launch on another stream, which would read their old values.
            torch.cuda._sleep(10**6)
            items = torch.zeros(64, dtype=torch.int64, device="cuda") + number
            for _ in range(4):
                out = torch.zeros_like(items)
                launch(1, (items, out))
            stream.synchronize()
            results[number] = items, out

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(9)))

    assert all(torch.equal(out, draw_bits(items, key=7)) for items, out in results.values())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 128, 129])
@pytest.mark.parametrize("placement", ["unified", "cuda"])
def test_rows_are_read_again_and_again(placement, width):
    from pyg_direct.features.tiers.base import TableTier

    rows = torch.arange(100.0).repeat_interleave(width).view(100, width)
    block = allocate(rows.numel() * 4, placement, "cuda")
    table = block.view_on_gpu(torch.float32, rows.shape)
    table.copy_(rows)
    tier = TableTier(table, placement, block=block, max_blocks=16 if placement == "unified" else None)

    for dtype in (torch.int64, torch.int32, torch.int64, torch.int32, torch.int64, torch.int32):
        ids = torch.randint(100, (37,)).to(dtype)
        assert torch.equal(tier.take(ids.cuda()).cpu(), rows[ids])


def test_arguments_are_settled_from_the_second_call_on(monkeypatch):
    monkeypatch.setattr(ops, "SIMULATED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = []
    # The GPU of tensors on the CPU has this number.
    launcher = SimpleNamespace(settle=lambda args: done.append(("settle", args)) or (
        lambda grid, block, values: done.append(("settled", grid, values))))  # fmt: skip
    dispatch = ops._Dispatch(draw_bits_gpu)
    dispatch.launchers[-1] = launcher
    dispatch.launches[-1] = lambda grid, block, args, stream: done.append(("whole", grid, args))
    monkeypatch.setitem(ops._DISPATCHES, draw_bits_gpu, dispatch)
    items, out = torch.arange(3), torch.zeros(3, dtype=torch.int64)

    launch = prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN)
    for grid in (1, 2, 3, 4):
        launch(grid, (items, out))

    whole = (7, items, 0, out)
    assert done == [("whole", 1, whole), ("whole", 2, whole), ("settle", (7, OPEN, 0, OPEN)),
                    ("settled", 3, (items, out)), ("settled", 4, (items, out))]  # fmt: skip


def pretend_to_compile(monkeypatch, compile_once):
    """Compile kernels by `compile_once` first and launch none; return the list of launches."""
    launched = []
    monkeypatch.setattr(ops, "SIMULATED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ops, "_DISPATCHES", {})

    def compile_kernel(self, key, args):
        compile_once()
        self.launchers[key] = SimpleNamespace(
            settle=lambda args: lambda grid, *rest: launched.append(("settled", grid))
        )
        self.launches[key] = lambda grid, *rest: launched.append(("whole", grid))
        return self.launches[key]

    monkeypatch.setattr(ops._Dispatch, "compile", compile_kernel)
    return launched


def test_a_call_after_one_that_failed_is_like_a_first(monkeypatch):
    errors = [RuntimeError("no room for the kernel")]

    def fail_once():
        if errors:
            raise errors.pop()

    launched = pretend_to_compile(monkeypatch, fail_once)
    launch, values = prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN), (torch.arange(3), torch.arange(3))

    with pytest.raises(RuntimeError, match="no room"):
        launch(1, values)
    for grid in (2, 3, 4):
        launch(grid, values)

    assert launched == [("whole", 2), ("whole", 3), ("settled", 4)]


def test_threads_may_make_the_first_calls_together(monkeypatch):
    # All of them come to compile the kernel before any has.
    launched = pretend_to_compile(monkeypatch, Barrier(4, timeout=20).wait)
    launch, values = prepare_gpu(draw_bits_gpu, 7, OPEN, 0, OPEN), (torch.arange(3), torch.arange(3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda grid: launch(grid, values), range(4)))
    launch(4, values)

    assert sorted(launched[:4]) == [("whole", grid) for grid in range(4)]
    assert launched[4:] == [("settled", 4)]


@pytest.mark.gpu
def test_rows_are_read_first_by_several_threads(monkeypatch):
    from pyg_direct.features.tiers.base import TableTier

    table, ids = torch.arange(64.0, device="cuda").view(16, 4), torch.arange(16, device="cuda").flip(0)
    start = Barrier(4, timeout=60)

    def read(tier):
        start.wait()
        return [tier.take(ids) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            # As if no kernel had been compiled.
            monkeypatch.setattr(ops, "_DISPATCHES", {})
            found = list(pool.map(read, [TableTier(table, "cuda")] * 4))
            assert all(torch.equal(rows, table[ids]) for thread in found for rows in thread)
