"""Tensors over addresses: the same bytes, kept as long as they are seen, of the device that was named."""

import gc
import weakref

import pytest
import torch

from pyg_direct.runtime.cuda.memory import allocate
from pyg_direct.runtime.host.tensor_views import view_address

CPU = torch.device("cpu")
PLACEMENTS = ["cuda", "unified", "pinned"]


class Owner:
    def __init__(self, num_bytes):
        self.rows = torch.arange(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [1, 3, 200])
def test_the_bytes_are_those_at_the_address(num_bytes):
    owner = Owner(num_bytes)

    got = view_address(owner.rows.data_ptr(), num_bytes, CPU, owner)
    got[0] = 77

    assert got.data_ptr() == owner.rows.data_ptr()
    assert torch.equal(got, owner.rows)
    assert (got.device, got.dtype, got.shape, int(owner.rows[0])) == (CPU, torch.uint8, (num_bytes,), 77)


def test_the_owner_lives_as_long_as_a_view():
    owner = Owner(16)
    kept = weakref.ref(owner)
    view = view_address(owner.rows.data_ptr(), 16, CPU, owner)[8:].view(torch.int64)
    del owner
    gc.collect()
    assert kept() is not None
    assert view.view(torch.uint8).tolist() == list(range(8, 16))

    del view
    gc.collect()

    assert kept() is None


def make_block(placement):
    block = allocate(1 << 26, placement, "cuda:0")
    own = block.view_on_gpu(torch.int32, (1 << 24,))
    own.copy_(torch.arange(1 << 24))
    torch.cuda.synchronize(0)
    return block, own


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_gpu_of_the_process_reads_a_block_in_place(placement):
    block, own = make_block(placement)
    torch.empty(0, device="cuda:1")
    before = torch.cuda.memory_reserved(1)

    seen = block.view_on_gpu(torch.int32, (1 << 24,), "cuda:1")

    assert seen.device == torch.device("cuda", 1)
    assert seen.data_ptr() == own.data_ptr()
    # A copy would take 64 MiB. The driver's free memory also depends on other programs.
    assert torch.cuda.memory_reserved(1) == before
    ids = torch.tensor([0, 5, (1 << 24) - 1], device="cuda:1")
    assert seen[ids].tolist() == ids.tolist()
    # It is one memory.
    seen[:3] = 9
    torch.cuda.synchronize(1)
    assert own[:4].tolist() == [9, 9, 9, 3]


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_view_of_another_gpu_keeps_the_block(placement):
    block, own = make_block(placement)
    seen = block.view_on_gpu(torch.int32, (1 << 24,), "cuda:1")
    del block, own
    gc.collect()

    taken = torch.zeros(1 << 24, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize()

    assert int(seen[-1]) == (1 << 24) - 1
    del taken
