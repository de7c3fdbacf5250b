"""Launches that differ in few arguments give what launches with all of them do."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.kernels.draw import draw_bits_gpu
from pyg_direct.kernels.jit import SIMULATED
from pyg_direct.ops import launch as ops
from pyg_direct.ops.draw import draw_bits
from pyg_direct.ops.launch import prepare_gpu
from pyg_direct.runtime.launch import OPEN
from pyg_direct.runtime.memory import allocate

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
            # Late items show a launch on another stream, which would read what they were before.
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
    from pyg_direct.features.tier import TableTier

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
    assert done == [("whole", 1, whole), ("settle", (7, OPEN, 0, OPEN)), ("whole", 2, whole),
                    ("settled", 3, (items, out)), ("settled", 4, (items, out))]  # fmt: skip
