"""Parts on several GPUs, exchanged by NCCL, give the batches of one GPU."""

import os
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed.dist_feature import DistFeature, PartitionInfo
from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import RankError
from pyg_direct.runtime.comm.communicator import Communicator
from tests.distributed.dist_loader.test_loader import LINK_CASES, NODE_CASES, make_loader
from tests.distributed.ranks import COMMON, as_dict, assert_in_turn, make_data, write_data
from tests.processes import ranks_started, run_ranks, wait_for_end


def load(rank, folder, backend, captured, replicas):
    torch.cuda.set_device(rank)
    with DistGraph(folder, device=f"cuda:{rank}", backend=backend, device_cache_size="50%", replicas=replicas,
                   share_graph=False, captured=captured) as graph:  # fmt: skip
        assert dist.get_world_size() == 2
        assert graph.communicator.captured == (backend == "nccl" and captured == "auto")
        found = []
        for options in ({}, {"disjoint": True}, {"replace": True}):
            loader = DistNeighborLoader(graph, [4, -1, 2], torch.arange(0, 300, 3), **options, **COMMON)
            found.append([{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in as_dict(batch).items()}
                          for batch in loader])  # fmt: skip
    return found


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize(("backend", "captured", "replicas"), [
    ("nccl", "auto", None), ("nccl", "auto", "30%"), ("nccl", False, "10%"), ("gloo", "auto", "10%"),
])  # fmt: skip
def test_batches_are_those_of_one_gpu(tmp_path, backend, captured, replicas):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(load, 2, tmp_path / "p", backend, captured, replicas)

    for place, options in enumerate(({}, {"disjoint": True}, {"replace": True})):
        alone = NeighborLoader(data, [4, -1, 2], torch.arange(0, 300, 3), device="cpu", **options, **COMMON)
        assert_in_turn([found[place] for found in ranks], alone)


def load_all(rank, folder, place="cuda"):
    """Batches of two epochs with each option."""
    if place == "cuda":
        torch.cuda.set_device(rank)
    found = {}
    for part in ("p", "timed"):
        with DistGraph(folder / part, device=f"{place}:{rank}" if place == "cuda" else place,
                       share_graph=False) as graph:  # fmt: skip
            for name in [*NODE_CASES, *LINK_CASES]:
                if ("time" in name or "weight" in name) == (part == "timed"):
                    loader = make_loader(name, graph, DistNeighborLoader, DistLinkNeighborLoader)
                    found[name] = [[as_dict(batch.cpu()) for batch in loader] for _ in range(2)]
    return found


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.timeout(600)
def test_batches_with_every_option_are_those_of_one_process(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)
    write_data(tmp_path / "timed", data, 2, times=True, weights=True)

    ranks = run_ranks(load_all, 2, tmp_path)

    assert set(ranks[0]) == {*NODE_CASES, *LINK_CASES}
    for name in ranks[0]:
        alone = make_loader(name, data, *(partial(kind, device="cpu") for kind in (NeighborLoader, LinkNeighborLoader)))
        for epoch in range(2):
            assert_in_turn([found[name][epoch] for found in ranks], alone)


def load_plainly(rank, folder, replicas):
    torch.cuda.set_device(rank)
    found = []
    with DistGraph(folder, device=f"cuda:{rank}", device_cache_size="50%", share_graph=False,
                   replicas=replicas if rank == 0 else None) as graph:  # fmt: skip
        for options in ({}, {"replace": True}):
            loader = DistNeighborLoader(graph, [4, -1, 2], torch.arange(300), batch_size=4, shuffle=True, seed=3,
                                        **options)  # fmt: skip
            for _ in range(2):
                found.append([{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in as_dict(batch).items()}
                              for batch in loader])  # fmt: skip
            # This rank leaves the loop, while the other one goes on.
            if rank == 0:
                next(iter(loader))
            else:
                assert len(list(loader)) == len(loader)
        assert loader._find_plain()._row_stream is not None
        assert (graph.rows.num_kept > 0) == (replicas is not None and rank == 0)
    return found


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("replicas", [None, "50%"])
def test_batches_without_rows_of_edges_overlap_over_several_steps(tmp_path, replicas):
    data = make_data()
    del data.edge_attr, data.weight
    partition_graph(tmp_path / "p", data.edge_index, 2, num_nodes=data.num_nodes,
                    node_rows={name: data[name] for name in ("x", "y", "train_mask", "time")})  # fmt: skip

    ranks = run_ranks(load_plainly, 2, tmp_path / "p", replicas)

    for place, options in ((0, {}), (2, {"replace": True})):
        alone = NeighborLoader(data, [4, -1, 2], torch.arange(300), batch_size=4, shuffle=True, seed=3, device="cpu",
                               **options)  # fmt: skip
        for epoch in range(2):
            assert_in_turn([found[place + epoch] for found in ranks], alone)


def load_until_lost(rank, folder, heard, is_killed):
    torch.cuda.set_device(rank)
    number = 0

    def transform(batch):
        nonlocal number
        number += 1
        if rank == 1 and number == 5:
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("on purpose")
        return batch

    with DistGraph(folder, device=f"cuda:{rank}", share_graph=False) as graph:
        loader = DistNeighborLoader(graph, [3, 2], batch_size=5, seed=1, transform=transform)
        try:
            heard_of = f"{len(list(loader))} of {len(loader)} batches"
        except (RankError, ZeroDivisionError) as error:
            heard_of = f"{type(error).__name__}: {error}"
    (heard / str(rank)).write_text(heard_of)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "its loop ends early"])
def test_a_rank_that_is_gone_is_named_and_one_that_ends_early_takes_part(tmp_path, is_killed):
    write_data(tmp_path / "p", make_data(), 2)

    with ranks_started(load_until_lost, 2, tmp_path / "p", tmp_path, is_killed, store="tcp") as context:
        wait_for_end(context, 0)

    told = (tmp_path / "0").read_text()
    # 60 batches of 5 seeds, of which each rank has half.
    assert told.startswith("RankError: rank 1 is gone") if is_killed else told == "30 of 30 batches"


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
