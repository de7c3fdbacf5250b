"""Rows of planned batches are those of the graph, and as few of them travel as the memory for them allows."""

import pytest
import torch

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.row_exchange import RowExchange, Wanted
from pyg_direct.distributed.row_foresight import KeptRows, PlannedRows
from pyg_direct.errors import IdError
from tests.distributed.lockstep import LockstepCommunicator, run_lockstep
from tests.distributed.ranks import CPU, make_data, write_data
from tests.distributed.threads import run_threads
from tests.plans import ON_GPU_PLANS

# Bytes of the rows of a node: x, y, train_mask and time.
ROW_BYTES = 20 + 8 + 1 + 8
AHEAD, STEP = 4, 2


def draw_batches(rank, count=11, size=60):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randperm(300, generator=generator)[:size] for _ in range(count)]


def count_fetched(batches, most_rows):
    """Rows that travel, with the best choice in hindsight among the known batches, by sets of Python."""
    kept, num_fetched = [], 0
    for first in range(0, len(batches), STEP):
        read = sorted(set().union(*batches[first : first + STEP]))
        new = [node for node in read if node not in kept]
        num_fetched += len(new)
        planned = batches[first + STEP : first + STEP + AHEAD]
        uses = {node: number for number, own in reversed(list(enumerate(planned))) for node in own}
        wanted = [node for node in [*kept, *new] if node in uses]
        # The sort keeps the order of equal ones.
        kept = sorted(sorted(wanted, key=uses.get)[:most_rows])
    return num_fetched


def fetch_all(part, rows, batches, room, device):
    """Rows of all batches, and the numbers of foresight."""
    planned = PlannedRows(rows, {"nodes": 300}, room, device)
    asked, found, most_bytes = [[Wanted("nodes", ids.to(device), is_distinct=True)] for ids in batches], [], 0
    for first in range(0, len(asked), STEP):
        for one in asked[max(0, first + AHEAD) if first else 0 : first + STEP + AHEAD]:
            planned.plan(one)
        of_nodes, _ = planned.fetch(asked[first : first + STEP])
        found += [own[0] for own in of_nodes]
        most_bytes = max(most_bytes, planned.num_bytes)
    assert most_bytes <= room
    assert planned.num_bytes == 0
    return found, planned.counts


def list_remote(part, batches):
    return [set(ids[part.owners("nodes", ids) != part.part].tolist()) for ids in batches]


def assert_rows(found, batches, data):
    for rows, ids in zip(found, batches, strict=True):
        assert set(rows) == {"x", "y", "train_mask", "time"}
        for name, value in rows.items():
            assert torch.equal(value.cpu(), data[name][ids]), name


@pytest.mark.parametrize("most_rows", [1000, 30, 7, 0])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_as_few_rows_travel_as_the_memory_allows(tmp_path, num_parts, most_rows):
    data = make_data()
    write_data(tmp_path / "p", data, num_parts)

    def run(comm):
        part = GraphPart(tmp_path / "p", comm.rank, device=CPU)
        rows, batches = RowExchange(part, comm), draw_batches(comm.rank)
        found, counts = fetch_all(part, rows, batches, most_rows * ROW_BYTES, CPU)
        assert_rows(found, batches, data)
        remote = list_remote(part, batches)
        # Rows that are read at the same time are chosen in the order of nodes, of two parts.
        expected = count_fetched(remote, most_rows)
        return counts, sum(map(len, remote)), expected, rows.num_remote

    for counts, num_read, expected, num_remote in run_threads(run, num_parts):
        assert counts.num_read == num_read
        assert counts.num_fetched == num_remote
        assert counts.num_fetched == expected if num_parts == 2 or most_rows in (0, 1000) else (
            abs(counts.num_fetched - expected) <= 0.05 * expected)  # fmt: skip


@ON_GPU_PLANS
def test_rows_come_in_segments_beside_those_that_are_here(tmp_path, device):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    def run(transport):
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        rows, batches = RowExchange(part, LockstepCommunicator(transport)), draw_batches(transport.rank, 5, 20)
        found, counts = fetch_all(part, rows, batches, 1 << 20, device)
        assert rows._segments is not None
        return found, batches, counts, count_fetched(list_remote(part, batches), 300), rows.num_remote

    for found, batches, counts, expected, num_remote in run_lockstep(run, 2):
        assert_rows(found, batches, data)
        assert expected == counts.num_fetched == num_remote < counts.num_read


def test_copies_known_rows_and_rows_of_others_are_joined(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    def run(comm):
        part = GraphPart(tmp_path / "p", comm.rank, device=CPU)
        rows, batches = RowExchange(part, comm), draw_batches(comm.rank)
        rows.keep({"nodes": torch.arange(0, 300, 3)})
        found, counts = fetch_all(part, rows, batches, 1 << 20, CPU)
        assert_rows(found, batches, data)
        remote = [{node for node in own if node % 3} for own in list_remote(part, batches)]
        return counts.num_fetched, count_fetched(remote, 300)

    for num_fetched, expected in run_threads(run, 2):
        assert num_fetched == expected > 0


def test_planned_batches_that_are_not_made_are_forgotten(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)

    def run(comm):
        part = GraphPart(tmp_path / "p", comm.rank, device=CPU)
        planned = PlannedRows(RowExchange(part, comm), {"nodes": 300}, 1 << 20, CPU)
        wanted = [Wanted("nodes", ids, is_distinct=True) for ids in draw_batches(comm.rank, 3)]
        for one in wanted:
            planned.plan([one])
        planned.fetch([[wanted[0]]])
        before = planned.num_bytes
        planned.drop()
        planned.fetch([])
        return before, planned.num_bytes

    for before, after in run_threads(run, 2):
        assert before > 0 == after


def test_trees_share_the_rows_of_a_node(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    def run(comm):
        part = GraphPart(tmp_path / "p", comm.rank, device=CPU)
        rows, nodes = RowExchange(part, comm), torch.tensor([7, 5, 7, 6, 5, 5])
        planned = PlannedRows(rows, {"nodes": 300}, 1 << 20, CPU)
        batches = [[Wanted("nodes", nodes)], [Wanted("nodes", nodes.flip(0))]]
        for one in batches:
            planned.plan(one)
        found = [planned.fetch([one])[0][0][0] for one in batches]
        assert_rows(found, [nodes, nodes.flip(0)], data)
        remote = {node for node in (5, 6, 7) if int(part.owners("nodes", torch.tensor([node]))) != comm.rank}
        return planned.counts, len(remote)

    for counts, count in run_threads(run, 2):
        assert counts == (2 * count, count)


def test_slots_are_used_again():
    shapes = {"x": torch.empty(0, 2)}
    kept = KeptRows(100, shapes, CPU)
    table = torch.arange(200.0).view(100, 2)

    for first in range(0, 90, 10):
        new = torch.arange(first, first + 10)
        kept.replace(kept.ids >= first - 5, new, {"x": table}, new)
        assert kept.ids.tolist() == list(range(max(0, first - 5), first + 10))
        assert torch.equal(kept.rows["x"][kept.find(kept.ids)], table[kept.ids])

    assert kept.find(torch.tensor([3, 99])).tolist() == [-1, -1]
    assert len(kept.rows["x"]) <= 25


def test_a_bad_id_is_named(tmp_path):
    write_data(tmp_path / "p", make_data(), 1)

    def run(comm):
        part = GraphPart(tmp_path / "p", comm.rank, device=CPU)
        planned, wanted = PlannedRows(RowExchange(part, comm), {"nodes": 400}, 0, CPU), torch.tensor([301])
        planned.plan([Wanted("nodes", wanted, is_distinct=True)])
        with pytest.raises(IdError, match="ids must be held by this part, got 301"):
            planned.fetch([[Wanted("nodes", wanted, is_distinct=True)]])

    run_threads(run, 1)
