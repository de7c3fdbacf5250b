"""Loaders of two processes by where rows and neighbor lists lie on their host: the batches of one process."""

import pytest
import torch
import torch.distributed as dist

from pyg_direct import CSRTopo, NeighborLoader
from tests.batches import hash_batches, make_data
from tests.processes import run_ranks

# Rows that are shared out have hot ones in each process only.
WAYS = [("shard", "device_replicate"), *((cold, policy) for cold in ("unified", "pinned", "auto")
                                         for policy in ("device_replicate", "p2p_clique_replicate"))]  # fmt: skip
COMMON = {"batch_size": 16, "shuffle": True, "seed": 1}


def load(rank, kind):
    """(batches of two epochs, where the lists are, where the rows are) of each way."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if kind == "cuda":
            # As of a graph that GPUs have no room for.
            patch.setattr(CSRTopo, "choose_placement", lambda topology, device=None: "unified")
        for cold, policy in WAYS:
            loader = NeighborLoader(make_data(), [4, 3], torch.arange(64), device=device, ranks="auto",
                                    feature_cache="30%", cache_policy=policy, cold_policy=cold, **COMMON)  # fmt: skip
            epochs = [[hash_batches([batch.to("cpu")]) for batch in loader] for _ in range(2)]
            lines, attributes = loader._list_places()
            found[cold, policy] = epochs, lines[0].rpartition(", ")[2], attributes["x"].placement
            dist.barrier()
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.gpus])])
def test_batches_are_those_of_one_process(kind):
    alone = NeighborLoader(make_data(), [4, 3], torch.arange(64), device="cpu", **COMMON)
    expected = [[hash_batches([batch]) for batch in alone] for _ in range(2)]

    ranks = run_ranks(load, 2, kind)

    for rank, found in enumerate(ranks):
        for (cold, policy), (epochs, lists, rows) in found.items():
            assert epochs == [epoch[rank::2] for epoch in expected], (cold, policy)
            assert (rows == "sharded") == (cold == "shard"), (cold, policy, rows)
            if kind == "cuda":
                assert lists == ("pinned" if cold == "pinned" else "unified"), (cold, policy)
