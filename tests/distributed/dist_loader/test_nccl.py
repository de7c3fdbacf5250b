"""Parts on several GPUs, exchanged by NCCL, give the batches of one GPU."""

import threading

import pytest
import torch
import torch.distributed as dist

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_feature import DistFeature, PartitionInfo
from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.runtime.comm.communicator import Communicator
from tests.distributed.ranks import COMMON, as_dict, assert_in_turn, make_data, write_data
from tests.processes import run_ranks


def load(rank, folder, backend, captured):
    torch.cuda.set_device(rank)
    # Rows of replicas are exchanged in the older way.
    replicas = None if captured else "10%"
    with DistGraph(folder, device=f"cuda:{rank}", backend=backend, device_cache_size="50%", replicas=replicas,
                   share_graph=False, captured=captured) as graph:  # fmt: skip
        assert dist.get_world_size() == 2
        found = []
        for options in ({}, {"disjoint": True}, {"replace": True}):
            loader = DistNeighborLoader(graph, [4, -1, 2], torch.arange(0, 300, 3), **options, **COMMON)
            found.append([{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in as_dict(batch).items()}
                          for batch in loader])  # fmt: skip
    return found


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize(("backend", "captured"), [("nccl", False), ("gloo", False), ("nccl", True)])
def test_batches_are_those_of_one_gpu(tmp_path, backend, captured):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(load, 2, tmp_path / "p", backend, captured)

    for place, options in enumerate(({}, {"disjoint": True}, {"replace": True})):
        alone = NeighborLoader(data, [4, -1, 2], torch.arange(0, 300, 3), device="cpu", **options, **COMMON)
        assert_in_turn([found[place] for found in ranks], alone)


def read_and_drop(rank, backend):
    """Sums of rows by kernels that come late, when the rows were dropped and others read in their turn."""
    torch.cuda.set_device(rank)
    table, owners = torch.arange(1 << 20).view(-1, 64).float(), torch.arange(1 << 14) % 2
    comm = Communicator(device=torch.device("cuda", rank), backend=backend)
    feature = DistFeature(table[owners == rank], PartitionInfo(rank, rank, 2, owners), comm)
    sums, expected = [], []
    for step in range(20):
        ids, others = torch.randint(1 << 14, (2, 8000), generator=torch.Generator().manual_seed(2 * step + rank))
        rows, others, is_dropped = feature[ids], others.cuda(), threading.Event()

        def read_later(others=others, is_dropped=is_dropped):
            is_dropped.wait()
            return feature._fetch(others)

        upcoming = comm.submit(read_later)
        # The stream of this program is far behind that of the exchange.
        torch.cuda._sleep(20_000_000)
        sums.append(rows.double().sum())
        expected.append(float(table[ids].double().sum()))
        del rows
        is_dropped.set()
        upcoming.result()
    return [float(total) for total in sums] == expected


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_rows_stay_whole_while_they_are_read(backend):
    assert run_ranks(read_and_drop, 2, backend) == [True, True]
