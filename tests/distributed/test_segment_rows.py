"""Rows fetched in segments of fixed length are those of the whole graph, whatever room the segments have."""

import pytest
import torch

from pyg_direct.distributed import segment_rows
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import RowExchange, Wanted
from pyg_direct.errors import IdError
from tests.distributed.lockstep import LockstepCommunicator, run_lockstep
from tests.distributed.ranks import make_data, write_data
from tests.plans import ON_GPU_PLANS


def open_rows(folder, transport, device):
    part = GraphPart(folder, transport.rank, device=device)
    return RowExchange(part, LockstepCommunicator(transport)), part.manifest.edges[0].name


@ON_GPU_PLANS
@pytest.mark.parametrize(("num_parts", "method"), [(2, "hash"), (4, "range")])
def test_rows_are_those_of_the_graph(tmp_path, device, num_parts, method):
    data = make_data()
    write_data(tmp_path / "p", data, num_parts, method=method)

    def run(transport):
        rows, edge_type = open_rows(tmp_path / "p", transport, device)
        generator = torch.Generator().manual_seed(transport.rank)
        found = []
        # The last rank wants nothing, and answers.
        for count in (7, 200) if transport.rank + 1 < num_parts else (0, 0):
            nodes, edges = (torch.randint(high, (count,), generator=generator) for high in (300, 3000))
            ends = data.edge_index[1][edges]
            wanted = [Wanted("nodes", nodes.to(device)), Wanted(edge_type, edges.to(device), ["edge_attr"],
                                                                owned=("nodes", ends.to(device)))]  # fmt: skip
            found.append((nodes, edges, rows.fetch(wanted)))
        return found, rows.num_remote, rows._segments.room

    results = run_lockstep(run, num_parts)

    for found, num_remote, room in results:
        assert room == results[0][2]
        for nodes, edges, (of_nodes, of_edges) in found:
            assert set(of_nodes) == {"x", "y", "train_mask", "time"}
            for name, rows in of_nodes.items():
                assert rows.dtype == data[name].dtype
                assert torch.equal(rows.cpu(), data[name][nodes]), name
            assert torch.equal(of_edges["edge_attr"].cpu(), data.edge_attr[edges])
        assert (num_remote > 0) == any(nodes.numel() for nodes, *_ in found)


@ON_GPU_PLANS
def test_all_ranks_fetch_again_what_one_has_no_room_for(tmp_path, device, monkeypatch):
    data = make_data()
    write_data(tmp_path / "p", data, 2)
    monkeypatch.setattr(segment_rows, "_FIRST_ROWS", 1)

    def run(transport):
        rows, _ = open_rows(tmp_path / "p", transport, device)
        counts = []
        for _ in range(2):
            nodes = torch.arange(50 * (1 - transport.rank), device=device)
            before = transport.num_exchanges
            (found,) = rows.fetch([Wanted("nodes", nodes, ["y"], is_distinct=True)])
            counts.append(transport.num_exchanges - before)
            assert torch.equal(found["y"], data.y.to(device)[nodes])
        return counts

    # Ids, rows, and what did not fit; the second time all of it fits.
    assert run_lockstep(run, 2) == [[6, 3]] * 2


@ON_GPU_PLANS
def test_an_id_that_its_owner_does_not_hold_is_an_error_of_all_ranks(tmp_path, device):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    def run(transport):
        rows, edge_type = open_rows(tmp_path / "p", transport, device)
        # Edge 0 belongs to the owner of the node that it leads to; one of these nodes has another owner.
        edges = torch.zeros(2 * (1 - transport.rank), dtype=torch.int64, device=device)
        ends = torch.arange(2, device=device) if transport.rank == 0 else edges
        with pytest.raises(IdError, match="ids must be held by the part that owns them"):
            rows.fetch([Wanted(edge_type, edges, ["edge_attr"], owned=("nodes", ends), is_distinct=True)])

    owners = GraphPart(tmp_path / "p", 0, device=torch.device("cpu")).owners("nodes", torch.arange(2)).tolist()
    assert owners[0] != owners[1]
    run_lockstep(run, 2)


@ON_GPU_PLANS
def test_ranks_with_copies_of_rows_exchange_without_segments(tmp_path, device):
    write_data(tmp_path / "p", make_data(), 2)

    def run(transport):
        rows, _ = open_rows(tmp_path / "p", transport, device)
        before = rows._open_segments() is not None
        rows.keep({"nodes": torch.arange(50 * transport.rank)})
        return before, rows._open_segments() is None

    assert run_lockstep(run, 2) == [(True, True)] * 2
