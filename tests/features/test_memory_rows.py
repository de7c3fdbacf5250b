"""Hot rows over a tier that kernels read in place, and the choice of memory for the rows of a table."""

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.features.memory_rows import MemoryRows, Served, check_placing
from pyg_direct.features.tiers.choice import open_table
from pyg_direct.ops.rows.gather_rows import Directory
from tests.features.contract import bytes_of, make_rows

HOT = torch.tensor([0, 7, 21, 39])


def make_memory(device):
    """Make rows whose hot ones differ from the tier's, to distinguish them."""
    rows, hot = make_rows(), make_rows(4)
    expected = rows.clone()
    expected[HOT] = hot
    directory = Directory.of(HOT.to(device), 40).wait()
    memory = MemoryRows(open_table(rows.to(device)), device, torch.float32, hot=open_table(hot.to(device)),
                        directory=directory)  # fmt: skip
    return memory, expected


@pytest.mark.parametrize("way", ["take", "read"])
def test_hot_rows_are_read_from_their_own_tier(device, way):
    memory, expected = make_memory(device)
    ids = torch.randint(40, (300,))

    for _ in range(2):
        got = getattr(memory, way)(ids.to(device))
        assert torch.equal(bytes_of(got), bytes_of(expected)[ids])


@pytest.mark.gpu
def test_rows_are_written_in_the_tier_and_where_they_are_hot():
    device = torch.device("cuda", 0)
    memory, expected = make_memory(device)
    ids, rows = torch.tensor([7, 8, 39, 7]), make_rows(4)
    expected[ids[1:]] = rows[1:]

    memory.write(ids.to(device), rows.to(device))

    assert torch.equal(bytes_of(memory.take(torch.arange(40, device=device))), bytes_of(expected))
    assert torch.equal(bytes_of(memory.tier.table)[ids[1:]], bytes_of(rows[1:]))
    assert torch.equal(bytes_of(memory.hot.table), bytes_of(expected[HOT]))


def test_hot_rows_are_counted(device):
    memory, _ = make_memory(device)
    memory.count_served(Served(device))

    for way in (memory.take, memory.read):
        way(torch.tensor([0, 1, 7, 7, 40 - 1], device=device))

    assert (memory.num_read, memory.count_hot(10)) == (10, 8)
    memory.count_served(None)
    assert memory.num_read == 0


def test_a_copy_reads_the_same_rows(device):
    memory, expected = make_memory(device)

    other = memory.copy()

    assert torch.equal(bytes_of(other.read(HOT.to(device))), bytes_of(expected)[HOT])
    assert (other.tier, other.hot) == (memory.tier, memory.hot)


class OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)


def look_at(table, is_for_many):
    check_placing(table, OnGpu.device, table.dtype, "20%", hotness=torch.arange(40), csr_topo=None,
                  is_for_many=is_for_many)  # fmt: skip


def test_rows_that_lie_on_the_gpu_need_no_ranking_there():
    look_at(torch.rand(41, 5).as_subclass(OnGpu), False)

    for table, is_for_many in ((torch.rand(41, 5), False), (torch.rand(41, 5).as_subclass(OnGpu), True)):
        with pytest.raises(ArgumentError, match="hotness must hold a score for each of the 41 rows, got 40"):
            look_at(table, is_for_many)
