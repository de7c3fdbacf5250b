"""Rows that kernels read in place, wherever they lie."""

import pytest
import torch

from pyg_direct.errors import ArgumentError, ForkedProcessError
from pyg_direct.features.tiers.base import TableTier
from pyg_direct.runtime.cuda.memory import move
from pyg_direct.runtime.cuda.peer_memory import GRANULE, Spread, init_p2p
from tests.features.contract import TierContract, make_rows


class TestDeviceTier(TierContract):
    """Rows in the memory of the device itself."""

    @pytest.fixture
    def tier_of(self, device):
        return lambda rows: TableTier(rows.to(device), device.type)


@pytest.mark.gpu
class TestHostTier(TierContract):
    """Rows in host memory that a GPU reads."""

    @pytest.fixture(params=["unified", "pinned"])
    def tier_of(self, request):
        def make(rows):
            block = move(rows, request.param, "cuda")
            return TableTier(block.view_on_gpu(rows.dtype, rows.shape), block.placement, block=block, max_blocks=16)

        return make

    def test_rows_are_refused_in_a_forked_child(self, tier_of, monkeypatch):
        tier = tier_of(make_rows())
        monkeypatch.setattr(tier.block, "_process", -1)

        with pytest.raises(ForkedProcessError, match="spawn"):
            self.read(tier, [0])


@pytest.mark.gpu
@pytest.mark.gpus
class TestPeerTier(TierContract):
    """Rows in the memory of another GPU, which NVLink joins."""

    @pytest.fixture
    def tier_of(self):
        init_p2p([0, 1])

        def make(rows):
            num_bytes = rows.numel() * rows.element_size()
            spread = Spread.allocate(num_bytes, GRANULE, [1] * max(1, -(-num_bytes // GRANULE)))
            # Written by their owner, read by the other.
            spread.view(1).view(rows.dtype).view(rows.shape).copy_(rows)
            torch.cuda.synchronize(1)
            return TableTier(spread.view(0).view(rows.dtype).view(rows.shape), "peer")

        return make


def test_a_strided_table_is_refused():
    with pytest.raises(ArgumentError, match="table must be contiguous"):
        TableTier(torch.zeros(4, 6)[:, ::2], "cpu")


def test_writing_rows_of_another_shape_is_refused():
    tier = TableTier(make_rows(), "cpu")

    with pytest.raises(ArgumentError, match=r"rows must be \(2, 5\) of torch.float32 on cpu, got \(2, 4\)"):
        tier.write(torch.tensor([1, 2]), torch.zeros(2, 4))
