import pytest
import torch

from benchmarks.distributed.partitioning import NUM_EDGES, measure_cuts, measure_partitioning
from pyg_direct.datasets.dataset import NodeDataset


@pytest.mark.full
def test_a_file_is_partitioned_in_a_process_of_its_own():
    seconds, memory = measure_partitioning(5000 / NUM_EDGES)

    assert seconds.p50 > 0
    assert seconds.limit > 0
    assert memory.p50 > 0.05


def test_cuts_stand_beside_that_of_pymetis():
    # A ring of 40 groups of 25 nodes, each of which knows all others of its group.
    a, b = torch.combinations(torch.arange(25)).T
    inside = torch.stack([(torch.arange(0, 1000, 25)[:, None] + end).view(-1) for end in (a, b)])
    between = torch.stack([torch.arange(24, 1000, 25), torch.arange(25, 1025, 25) % 1000])
    edges = torch.cat([inside, between, torch.tensor([[3], [3]])], 1)
    graph = NodeDataset("ring", 1000, 1, edges, None, *[torch.empty(0, dtype=torch.int64)] * 4)

    rows = list(measure_cuts(graph, (1, 2, 4)))

    cuts, shares = rows[::2], rows[1::2]
    assert [(row.case, row.p50, row.limit) for row in cuts[::2]] == [
        (f"partition/ring/metis/{count}", cut, cut) for count, cut in ((1, 0), (2, 2), (4, 4))
    ]
    assert [row.case for row in cuts[1::2]] == [f"partition/ring/streaming/{count}" for count in (1, 2, 4)]
    # Its groups are whole.
    assert [row.limit for row in cuts[1::2]] == [0, 2, 4]
    # Of 12,041 edges; dealt out by chance, half of them and more lie between parts.
    assert cuts[1].p50 == 0
    assert all(0 < row.p50 < 600 for row in cuts[3::2])
    # Equal parts, of one to four groups that hold 250 nodes at the least.
    assert [row.metric for row in shares] == ["largest part over equal parts"] * 6
    assert all(1 <= row.p50 <= 1.1 for row in shares)
