import torch

from pyg_direct.bench.partitioning import NUM_EDGES, measure_metis_cut, measure_partitioning
from pyg_direct.datasets.dataset import NodeDataset


def test_a_file_is_partitioned_in_a_process_of_its_own():
    seconds, memory = measure_partitioning(5000 / NUM_EDGES)

    assert seconds.p50 > 0
    assert seconds.limit > 0
    assert memory.p50 > 0.05


def test_a_cut_by_metis_is_that_of_pymetis():
    # A ring of 40 groups of 25 nodes, each of which knows all others of its group.
    a, b = torch.combinations(torch.arange(25)).T
    inside = torch.stack([(torch.arange(0, 1000, 25)[:, None] + end).view(-1) for end in (a, b)])
    between = torch.stack([torch.arange(24, 1000, 25), torch.arange(25, 1025, 25) % 1000])
    edges = torch.cat([inside, between, torch.tensor([[3], [3]])], 1)
    graph = NodeDataset("ring", 1000, 1, edges, None, *[torch.empty(0, dtype=torch.int64)] * 4)

    rows = list(measure_metis_cut(graph, (1, 2, 4)))

    assert [(row.case, row.p50, row.limit) for row in rows] == [
        (f"partition/ring/metis/{count}", cut, cut) for count, cut in ((1, 0), (2, 2), (4, 4))
    ]
