"""Rows in the memories of several GPUs: read by each, and counted by their GPU."""

import pytest
import torch

from pyg_direct.features.tiers.in_memory import FarRows, PeerTier
from pyg_direct.runtime.cuda.peer_memory import GRANULE, Spread, init_p2p
from tests.features.contract import TierContract, make_rows


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
            return PeerTier(spread, spread.view(0).view(rows.dtype).view(rows.shape))

        return make


class Piece:
    def __init__(self, owner, num_bytes):
        self.owner, self.num_bytes = owner, num_bytes


class Pieces:
    def __init__(self, owners, num_bytes):
        self.chunks = [Piece(owner, num_bytes) for owner in owners]


@pytest.mark.parametrize("row_bytes", [12, 16, 64, 100])
@pytest.mark.parametrize("owners", [[0, 1], [1, 0, 1, 2], [0, 0], [2, 2, 2]])
def test_rows_of_other_gpus_are_counted(row_bytes, owners):
    chunk_bytes = 256
    rows = torch.zeros(len(owners) * chunk_bytes // row_bytes, row_bytes // 4)
    is_far = [owners[row * row_bytes // chunk_bytes] != 0 for row in range(len(rows))]
    places = torch.randint(-1, len(rows), (200,))

    far = FarRows(Pieces(owners, chunk_bytes), rows, torch.device("cpu", 0))
    far.count(places)
    far.count(places[:50])

    assert far.num_rows == sum(is_far)
    expected = [sum(is_far[place] for place in part.tolist() if place >= 0) for part in (places, places[:50])]
    assert far.num_read == sum(expected)


def test_reports_tell_rows_of_other_gpus_apart_where_reads_are_counted():
    # A GPU of None is the CPU: all rows belong to others.
    tier = PeerTier(Pieces([0, 1], 40), make_rows(4, row=(5,)))
    uncounted = tier.describe(4, None, "PCIe")

    tier.count_served(True)
    tier.note_read(torch.tensor([0, 3, -1, 4, 2**40]))

    assert [line[:2] for line in uncounted] == [("GPU memory", 4)]
    assert tier.describe(4, 2, "PCIe") == [("memory of other GPUs", 4, 2, "NVLink")]
    tier.count_served(False)
    assert tier.describe(4, None, "PCIe") == uncounted == [("GPU memory", 4, None, None)]
