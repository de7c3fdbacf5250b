"""Parts on several GPUs, exchanged by NCCL, give the batches of one GPU."""

import pytest
import torch
import torch.distributed as dist

from pyg_direct import NeighborLoader
from pyg_direct.distributed.graph import DistGraph
from pyg_direct.distributed.loader import DistNeighborLoader
from tests.distributed.ranks import as_dict, assert_equal, make_data, write_data
from tests.processes import run_ranks

COMMON = {"batch_size": 16, "shuffle": True, "seed": 3}


def load(rank, folder, backend):
    torch.cuda.set_device(rank)
    with DistGraph(folder, device=f"cuda:{rank}", backend=backend, device_cache_size="50%", replicas="10%") as graph:
        assert dist.get_world_size() == 2
        found = []
        for options in ({}, {"disjoint": True}, {"replace": True}):
            loader = DistNeighborLoader(graph, [4, -1, 2], torch.arange(0, 300, 3), **options, **COMMON)
            found.append([{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in as_dict(batch).items()}
                          for batch in loader])  # fmt: skip
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_batches_are_those_of_one_gpu(tmp_path, backend):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(load, 2, tmp_path / "p", backend)

    for place, options in enumerate(({}, {"disjoint": True}, {"replace": True})):
        alone = NeighborLoader(data, [4, -1, 2], torch.arange(0, 300, 3), device="cpu", **options, **COMMON)
        for number, batch in enumerate(alone):
            assert_equal(ranks[number % 2][place][number // 2], as_dict(batch))
