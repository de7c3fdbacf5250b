"""Processes of one host read each other's rows in memory that they share, and exchange only those of other hosts."""

import os
import threading

import pytest
import torch

from pyg_direct.distributed import DistGraph, dist_graph, row_exchange
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import TIME, RowExchange, Wanted
from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.host.shared_memory import open_shared
from tests.distributed.ranks import CPU, make_data, write_data
from tests.distributed.threads import run_threads

# Hosts of three processes, and what each sees of the others.
WAYS = {"aaa": [[1, 2], [0, 2], [0, 1]], "aab": [[1], [0], []], "aba": [[2], [], [0]], "abc": [[], [], []]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / "p"
    write_data(folder, make_data(), 3, times=True)
    return folder


def fetch(comm, folder, hosts, monkeypatch, keeps):
    """Rows of nodes and of edges, and how many were exchanged."""
    part = GraphPart(folder, comm.rank, device=CPU)
    monkeypatch.setitem(HOSTS, threading.get_ident(), hosts[comm.rank])
    rows = RowExchange(part, comm)
    rows.read_peers()
    if keeps:
        rows.keep({"nodes": torch.arange(0, 300, 4)})
    generator, kind = torch.Generator().manual_seed(comm.rank), part.manifest.edges[0].name
    nodes = torch.randint(300, (200,), generator=generator)
    edges = torch.randperm(3000, generator=generator)[:100]
    ends = make_data().edge_index[1][edges]
    before = comm.sent["rows"]
    found = rows.fetch([Wanted("nodes", nodes), Wanted(kind, edges, owned=("nodes", ends), is_distinct=True)])
    found += rows.fetch([Wanted("nodes", nodes[:7], [TIME])])
    return found, nodes, edges, rows._peers.parts, rows.num_remote, comm.sent["rows"] - before


HOSTS = {}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("hosts", WAYS)
def test_rows_are_those_of_the_graph(folder, monkeypatch, hosts, keeps):
    monkeypatch.setattr(row_exchange, "identify_host", lambda: HOSTS[threading.get_ident()])
    data = make_data()

    got = run_threads(lambda comm: fetch(comm, folder, hosts, monkeypatch, keeps), 3)

    for (of_nodes, of_edges, of_times), nodes, edges, *_ in got:
        for name in ("x", "y", "train_mask", "time"):
            assert torch.equal(of_nodes[name], data[name][nodes])
        assert torch.equal(of_edges["edge_attr"], data.edge_attr[edges])
        assert torch.equal(of_edges["weight"], data.weight[edges])
        assert torch.equal(of_times[TIME], data.time[nodes[:7]])
    assert [parts for *_, parts, _, _ in got] == WAYS[hosts]
    remote, sent = zip(*((num_remote, num_bytes) for *_, num_remote, num_bytes in got), strict=True)
    # Those that see nobody get all rows of others by the exchange, those who see all of them none.
    assert [count > 0 for count in remote] == [len(seen) < 2 for seen in WAYS[hosts]]
    assert (sum(sent) > 0) == (hosts != "aaa")


def test_memory_out_of_sight_is_left_to_the_exchange(folder, monkeypatch):
    monkeypatch.setattr(row_exchange, "open_shared", lambda *_: open_shared(os.getpid(), 1 << 20, 1))
    monkeypatch.setattr(row_exchange, "identify_host", lambda: HOSTS[threading.get_ident()])

    got = run_threads(lambda comm: fetch(comm, folder, "aaa", monkeypatch, False), 3)

    assert [parts for *_, parts, _, _ in got] == [[], [], []]
    assert all(torch.equal(of_nodes["x"], make_data().x[nodes]) for (of_nodes, *_), nodes, *_ in got)


def test_gpus_share_no_rows_yet(monkeypatch):
    monkeypatch.setattr(dist_graph, "resolve_device", torch.device)

    with pytest.raises(ArgumentError, match="share_rows needs device='cpu', got 'cuda:0'"):
        DistGraph("nowhere", device="cuda:0", share_rows=True)
