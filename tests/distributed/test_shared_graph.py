"""A graph in parts that lies in one memory of its processes: the batches of one machine, without an exchange."""

import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed import (
    DistGraph,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    DistSubGraphLoader,
    dist_graph,
    shared_graph,
)
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.shared_graph import WholeGraph, find_obstacle, fit_cache
from pyg_direct.errors import ArgumentError, PartitionError, RankError
from pyg_direct.features.process_sharing import PARTS, fit_rows
from pyg_direct.runtime.cuda.peer_memory import GRANULE
from pyg_direct.runtime.host.shared_memory import find_shared, open_shared
from tests.distributed.dist_loader.test_loader import (
    LINK_CASES,
    NODE_CASES,
    assert_typed,
    make_loader,
    make_typed_loaders,
    to_cpu,
    write_types,
)
from tests.distributed.ranks import (
    COMMON,
    CPU,
    as_dict,
    assert_equal,
    assert_in_turn,
    make_data,
    open_graph,
    write_data,
)
from tests.distributed.threads import run_threads
from tests.processes import ranks_started, run_ranks, wait_for_end

DRAWN = {"weight_attr": "weight", "replace": True}


def load_all(graph, names):
    """Two epochs of each case, made while the process sends nothing."""
    found = {}
    for name in names:
        loader = make_loader(name, graph, DistNeighborLoader, DistLinkNeighborLoader)
        is_planned = name in ("plain", "replace")
        before, asked = graph.communicator.sent.copy(), [] if is_planned else count_asked(loader._sampler)
        found[name] = [[as_dict(batch) for batch in loader] for _ in range(2)]
        assert graph.communicator.sent == before
        # Uniform batches come from the plan, as those of one machine do.
        if name in NODE_CASES:
            assert (loader._plan is not None) == is_planned
            assert len(asked) == (0 if is_planned else sum(map(len, found[name])))
    return found


def count_asked(sampler):
    """A list that gets an item whenever PyG's interface of a sampler is asked for a batch of nodes."""
    asked, sample = [], sampler.sample_from_nodes
    sampler.sample_from_nodes = lambda *args, **options: asked.append(1) or sample(*args, **options)
    return asked


def describe_memory(graph):
    """Which files the arrays of a graph lie in, and how many bytes this process counts for its own."""
    arrays = [*graph.whole.place().rows, *(feature.stored.tier.table for feature in graph.rows.describe().values())]
    files = [os.fstat(find_shared(array).descriptor).st_ino for array in arrays if array.numel()]
    return files, graph.num_bytes


def run_cases(rank, folder, cases):
    found = {}
    with open_graph(folder / "p", share_graph=True) as graph:
        found["memory"] = describe_memory(graph)
        found |= load_all(graph, cases[0])
        # The calls of one process do not wait for those of another.
        loader = DistSubGraphLoader(graph, [2], torch.arange(20), batch_size=4, seed=2, ranks="own")
        called = [loader([0, 1]) for _ in range(rank)]
        found["own"] = len(called), len(list(loader)), graph.own_nodes().tolist()
        found["rows"] = graph.own_rows("x")
    with open_graph(folder / "timed", share_graph="auto", share_rows=True, replicas="20%") as graph:
        assert graph.obstacle is None
        found |= load_all(graph, cases[1])
        loader = DistNeighborLoader(graph, [4, 3], torch.arange(0, 300, 3), **DRAWN, **COMMON)
        found["drawn"] = [[as_dict(batch) for batch in loader] for _ in range(2)]
    with open_graph(folder / "types", share_graph=True) as graph:
        loaders = make_typed_loaders(graph, DistNeighborLoader, DistLinkNeighborLoader)
        found["types"] = [[as_dict(batch) for batch in loader] for loader in loaders]
    return found


def test_batches_are_those_of_one_machine(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)
    write_data(tmp_path / "timed", data, 2, times=True, weights=True)
    is_timed = {name: "time" in name or "weight" in name for name in {**NODE_CASES, **LINK_CASES}}
    cases = [[name for name, timed in is_timed.items() if not timed], [n for n, timed in is_timed.items() if timed]]
    typed = write_types(tmp_path / "types", 2)

    ranks = run_ranks(run_cases, 2, tmp_path, cases)

    drawn = NeighborLoader(data, [4, 3], torch.arange(0, 300, 3), **DRAWN, **COMMON, device="cpu")
    for name in [*is_timed, "drawn"]:
        alone = drawn if name == "drawn" else make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            own = [found[name][epoch] for found in ranks]
            assert set(map(len, own)) == {-(-len(alone) // len(own))}
            assert_in_turn(own, alone)
    # Each array lies in one file, which both have open, and each process counts half of it.
    (files, num_bytes), (others, same) = (found["memory"] for found in ranks)
    assert files == others
    assert len(set(files)) == len(files) > 6
    whole = sum(data[name].nbytes for name in ("x", "y", "train_mask", "time", "edge_attr", "weight"))
    assert num_bytes == same == (whole + 8 * 301 + 8 * 3000) // 2
    assert [found["own"][:2] for found in ranks] == [(0, 5), (1, 5)]
    for found in ranks:
        assert torch.equal(found["rows"], data.x[found["own"][2]])
    assert_typed(typed, [found["types"] for found in ranks])


def open_whole(communicator, folder):
    part = GraphPart(folder, communicator.rank, device=CPU, map_rows=True)
    return WholeGraph(part, communicator, CPU, 0, "unified").place()


@pytest.mark.parametrize("method", ["range", "hash", "metis"])
def test_rows_stand_as_on_one_machine(tmp_path, method):
    data = make_data(500, 4000)
    write_data(tmp_path / "one", data, 1, method=method)
    write_data(tmp_path / "four", data, 4, method=method)

    (expected,) = run_threads(lambda comm: open_whole(comm, tmp_path / "one"), 1)
    placed = run_threads(lambda comm: open_whole(comm, tmp_path / "four"), 4)

    for one in placed:
        assert all(torch.equal(got, want) for got, want in zip(one.rows, expected.rows, strict=True))
        assert one.topo.row_starts.tolist() == expected.topo.row_starts.tolist() == [0, 500]
        assert one.topo.edge_starts.tolist() == expected.topo.edge_starts.tolist() == [0, 4000]


def place_apart(communicator, host, monkeypatch):
    """What a process says that sees itself on a host of its own, or no memory of others."""
    monkeypatch.setitem(HOSTS, threading.get_ident(), host)
    return find_obstacle(communicator)


HOSTS = {}


def refuse(process, descriptor, num_bytes):
    if HOSTS[threading.get_ident()] == "blind":
        raise PermissionError(f"no descriptor {descriptor} of process {process}")
    return open_shared(process, descriptor, num_bytes)


@pytest.mark.parametrize(("hosts", "words"), [
    ("aaa", None), ("aba", "rank 1 is on another host than rank 0"), (["a", "a", "blind"], "rank 2 cannot open")
])  # fmt: skip
def test_one_reason_is_told_to_all(monkeypatch, hosts, words):
    monkeypatch.setattr(shared_graph, "open_shared", refuse)
    monkeypatch.setattr(shared_graph, "identify_host", lambda: HOSTS[threading.get_ident()].replace("blind", "a"))

    told = run_threads(lambda comm: place_apart(comm, hosts[comm.rank], monkeypatch), 3)

    assert len(set(told)) == 1
    assert told[0] is None if words is None else words in told[0]


@pytest.mark.parametrize(("num_bytes", "words"), [
    (1000, None), (1001, "it takes 1001 bytes of host memory to put the graph together, which has 1000 to give")
])  # fmt: skip
def test_a_graph_that_the_host_has_no_room_for_stays_in_parts(monkeypatch, num_bytes, words):
    monkeypatch.setattr(shared_graph, "available_bytes", lambda: 1250)

    assert run_threads(lambda comm: find_obstacle(comm, num_bytes), 3) == [words] * 3


@pytest.mark.parametrize(("told", "words"), [
    ([["a", "cpu", 0, ""], ["a", "cuda", 0, "x"]], "rank 1 is on a cuda device, rank 0 on cpu"),
    ([["a", "cuda", 0, "x"], ["a", "cuda", 0, "x"]], "ranks 0 and 1 are on the same GPU"),
    ([["a", "cuda", 0, "x"], ["a", "cuda", 1, "x"]], "GPU 1 of rank 1 has another number in other processes"),
    ([["a", "cuda", 0, "x"], ["a", "cuda", 1, "y"]], "GPUs 0 and 1 are not joined by NVLink"),
    ([["a", "cuda", 0, "x"]] * 3, "the group is not that of all processes"),
])  # fmt: skip
def test_gpus_that_cannot_are_named(monkeypatch, told, words):
    monkeypatch.setattr(shared_graph.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(shared_graph.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shared_graph, "_name_gpu", "xy".__getitem__)
    monkeypatch.setattr(shared_graph, "p2pCliqueTopo", lambda devices: SimpleNamespace(p2p_clique={0: [0], 1: [1]}))

    assert words in (shared_graph._compare(told) or shared_graph._compare_gpus(told))


def fail_to_open(rank, folder):
    found = []
    for wrong in ({"share_graph": "never"}, {"share_graph": 2}, {"placement": "gpu"}, {"device_cache_size": "much"}):
        try:
            DistGraph(folder, device=CPU, **wrong)
        except ArgumentError as error:
            found.append(str(error))
    if rank == 1:
        os.truncate(folder / "part-00001/edge-0.indices.npy", 200)
    try:
        DistGraph(folder, device=CPU, share_graph=True)
    except (PartitionError, RankError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def run_until_killed(rank, folder):
    """Errors first; then rank 1 is killed in the middle of an epoch, which rank 0 goes on with."""
    torch.save(fail_to_open(rank, folder / "damaged"), folder / f"{rank}-errors")
    batches = []
    for number, batch in enumerate(DistNeighborLoader(open_graph(folder / "p", share_graph=True), [3, 2], **COMMON)):
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while number == 2 and not (folder / "dead").exists():
            time.sleep(0.01)
        batches.append(as_dict(batch))
    torch.save(batches, folder / "found")


def test_errors_are_told_and_who_is_killed_leaves_the_others_all_they_read(tmp_path):
    data = make_data()
    for name in ("p", "damaged"):
        write_data(tmp_path / name, data, 2)

    with ranks_started(run_until_killed, 2, tmp_path) as context:
        wait_for_end(context, 1)
        (tmp_path / "dead").touch()
        wait_for_end(context, 0)

    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL]
    for rank in range(2):
        *wrong, placement, size, damaged = torch.load(tmp_path / f"{rank}-errors")
        assert placement == "placement must be 'unified' or 'pinned', got 'gpu'"
        assert re.match("device_cache_size must look like .* got 'much'", size)
        assert wrong == [f"share_graph must be True, False or 'auto', got {value!r}" for value in ("never", 2)]
        assert damaged.startswith("PartitionError: " if rank == 1 else "RankError: rank 1 failed: PartitionError: ")
        assert "edge-0.indices.npy" in damaged
    expected = list(NeighborLoader(data, [3, 2], device="cpu", **COMMON))[::2]
    for got, batch in zip(torch.load(tmp_path / "found", weights_only=False), expected, strict=True):
        assert_equal(got, as_dict(batch))


def test_a_host_apart_is_refused_where_one_memory_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(dist_graph, "Communicator", lambda *args, **options: SimpleNamespace(
        size=2, rank=0, captured=False, run=lambda *given: "rank 1 is on another host than rank 0",
        close=lambda: None))  # fmt: skip

    with pytest.raises(ArgumentError, match=r"share_graph=True needs .* rank 1 is on another host"):
        DistGraph(tmp_path, device=CPU, share_graph=True)


GPU_CASES = ["plain", "replace", "disjoint", "induced", "binary", "strict"]


def load_on_gpu(rank, folder, cache):
    torch.cuda.set_device(rank)
    found, options = {}, {"device": torch.device("cuda", rank), "device_cache_size": cache, "share_graph": True}
    for name, cases in (("p", GPU_CASES), ("timed", ["weights", "last times"])):
        with open_graph(folder / name, **options) as graph:
            for case, epochs in load_all(graph, cases).items():
                found[case] = [[to_cpu(batch) for batch in epoch] for epoch in epochs]
    with open_graph(folder / "types", **options) as graph:
        loaders = make_typed_loaders(graph, DistNeighborLoader, DistLinkNeighborLoader)
        found["types"] = [[to_cpu(as_dict(batch)) for batch in loader] for loader in loaders]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["100%", 0])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.gpus)])
def test_gpus_give_the_batches_of_one_machine(tmp_path, count, cache):
    data = make_data()
    write_data(tmp_path / "p", data, count)
    write_data(tmp_path / "timed", data, count, times=True, weights=True)
    typed = write_types(tmp_path / "types", count)

    ranks = run_ranks(load_on_gpu, count, tmp_path, cache)

    for name in [*GPU_CASES, "weights", "last times"]:
        alone = make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            for number, batch in enumerate(alone):
                assert_equal(ranks[number % count][name][epoch][number // count], to_cpu(as_dict(batch)))
    assert_typed(typed, [found["types"] for found in ranks])


def make_large_data():
    """Of more chunks of rows and of neighbors than one."""
    data = make_data(20_000, 1_000_000)
    data.x = torch.arange(20_000 * 128).view(20_000, 128).float()
    return data


def load_from_peers(rank, folder):
    """Batches of a GPU, and bytes of their rows that lie on the other."""
    torch.cuda.set_device(rank)
    with open_graph(folder, device=torch.device("cuda", rank), device_cache_size="100%", share_graph=True) as graph:
        assert graph.obstacle is None
        before = graph.communicator.sent.copy()
        loader = DistNeighborLoader(graph, [10, 5], batch_size=512, shuffle=True, seed=1)
        batches = [to_cpu(as_dict(batch)) for batch in loader]
        # Where each keeps its share is told; nodes, edges and rows are not sent.
        assert (graph.communicator.sent - before).keys() <= {"words"}
        topology, handle = graph.whole.place_plain(), graph.rows.describe()["x"].share_ipc()
        assert (topology.placement, topology.device.index) == ("peer", rank)
        return batches, handle.hot[0].spread.bytes_on(1 - rank)


@pytest.mark.gpu
@pytest.mark.gpus
def test_gpus_read_each_others_memory(tmp_path):
    data = make_large_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(load_from_peers, 2, tmp_path / "p")

    alone = NeighborLoader(data, [10, 5], batch_size=512, shuffle=True, seed=1, device="cpu")
    assert_in_turn([batches for batches, _ in ranks], alone)
    assert all(num_bytes >= data.x.nbytes // 4 for _, num_bytes in ranks)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 300, 20_000, 2_449_029])
@pytest.mark.parametrize("row_bytes", [1, 8, 400, 512])
def test_shares_that_add_up_to_all_rows_hold_all(size, num_rows, row_bytes):
    num_bytes = num_rows * row_bytes

    budget = fit_cache(num_bytes, size, "100%")
    count, chunk_bytes = fit_rows(num_rows, row_bytes, budget, size)

    # Less than a chunk is copied by each.
    assert count == num_rows if budget >= GRANULE else budget >= num_bytes
    assert budget <= -(-num_bytes // size) + PARTS * GRANULE
    assert chunk_bytes % GRANULE == 0
    assert fit_cache(num_bytes, size, "50%") <= num_bytes / size / 2 + 1
    assert fit_cache(num_bytes, size, 0) == 0
