"""Rows that come with the batches of captured plans are those of the whole graph, whatever room there is for them."""

from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from pyg_direct.distributed import captured_rows
from pyg_direct.distributed.captured_rows import CapturedRows
from pyg_direct.distributed.exchange_plan import ExchangePlan
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.features.feature import Feature
from pyg_direct.runtime.comm.nccl_segments import NcclSegments
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.distributed.lockstep import LockstepCommunicator, run_lockstep
from tests.distributed.test_exchange_plan import FANOUTS, make_requests
from tests.hetero_graphs import make_parts, odd_parts, odd_requests
from tests.plans import KEY, ON_GPU_PLANS
from tests.reference.general import Options
from tests.sampling.hetero_plan.test_general import as_tensors


def make_rows(graph):
    """Rows of all types but the last; widths and dtypes differ."""
    generator, rows = torch.Generator().manual_seed(0), {}
    for number, (kind, size) in enumerate([*graph.num_nodes.items()][:-1]):
        rows[kind] = {"x": torch.rand(size, 3 + 5 * number, generator=generator)}
    kind, size = next(iter(graph.num_nodes.items()))
    rows.setdefault(kind, {}).update(
        y=torch.randint(1 << 40, (size,), generator=generator), train_mask=torch.rand(size, generator=generator) < 0.5,
        half=torch.rand(size, 2, generator=generator).half(),
    )  # fmt: skip
    return rows


def write(folder, graph, num_parts, rows, method="hash"):
    edges = {t: torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t() for t, pairs in graph.edges.items()}
    times = {kind: torch.tensor(own) for kind, own in graph.node_time.items()}
    partition_graph(folder, edges, num_parts, num_nodes=graph.num_nodes, node_rows=rows, method=method,
                    direction=graph.direction, node_time=times or None)  # fmt: skip


def sample_with_rows(folder, requests, recipe, num_parts, device, timed=False, beside=False, copied=None):
    """For each rank: its samples, the rows that others sent, its plan, and the number of its exchanges.

    Args:
        copied: For each rank, ids by type whose rows it copies.
    """

    def run(transport):
        # Rows may be exchanged by themselves.
        transport.beside = transport if beside else None
        part, comm = GraphPart(folder, transport.rank, device=device), LockstepCommunicator(transport)
        features = {kind: {name: Feature(device=device).from_cpu_tensor(rows) for name, rows in table.rows.items()}
                    for kind, table in part.tables.items()}  # fmt: skip
        rows = RowExchange(part, comm, features)
        if copied is not None:
            rows.keep(copied[transport.rank])
        plan, found = PartPlan(part, recipe, comm, timed=timed, weighted=False, rows=rows), []
        for number in range(transport.rank, -(-len(requests) // num_parts) * num_parts, num_parts):
            seeds, times = requests[number] if number < len(requests) else ({}, {})
            found.append(plan.sample(as_tensors(seeds, device), KEY + number,
                                     seed_time=as_tensors(times, device) if timed else None))  # fmt: skip
        if copied is not None:
            found.append(rows.num_kept)
        return found, rows.num_remote, plan._find_captured(), transport.num_exchanges

    return run_lockstep(run, num_parts)


def check(samples, graph, rows):
    """Types stand in the order of the partition."""
    for sample in samples:
        assert set(sample.node) == set(graph.num_nodes)
        for kind, own in zip(sample.node, sample.rows, strict=True):
            assert set(own) == set(rows.get(kind, ()))
            for name, value in own.items():
                assert value.dtype == rows[kind][name].dtype
                assert torch.equal(value.cpu(), rows[kind][name][sample.node[kind].cpu()]), (kind, name)


@ON_GPU_PLANS
@pytest.mark.parametrize(("num_parts", "method"), [(2, "hash"), (4, "range")])
@pytest.mark.parametrize("options", [
    Options(), Options(disjoint=True), Options(subgraph_type="bidirectional"), Options(temporal_strategy="last"),
], ids=["uniform", "trees", "both", "last"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_rows_come_with_the_batch(tmp_path, device, num_parts, method, options):
    timed = options.temporal_strategy == "last"
    graph = make_parts(times="node" if timed else "")
    rows, requests = make_rows(graph), make_requests(num_parts + 1)
    write(tmp_path / "p", graph, num_parts, rows, method)

    recipe = GeneralRecipe(FANOUTS, **asdict(options))
    results = sample_with_rows(tmp_path / "p", requests, recipe, num_parts, device, timed)

    owners = {kind: GraphPart(tmp_path / "p", 0, device=torch.device("cpu")).books[kind] for kind in graph.num_nodes}
    for rank, (samples, num_remote, plan, _) in enumerate(results):
        check(samples, graph, rows)
        assert plan.room == results[0][2].room
        # Rows that are sent, and room that is not used.
        assert plan._sent["rows"] > 0
        assert plan._sent["hops"] > 0
        assert num_remote == sum(int((owners[kind].owners(ids.cpu()) != rank).sum())
                                 for sample in samples for kind, ids in sample.node.items())  # fmt: skip


@ON_GPU_PLANS
@settings(deadline=None)
@given(st.data(), st.booleans(), st.integers(1, 4))
def test_rows_of_odd_graphs(tmp_path_factory, device, data, disjoint, num_parts):
    graph = data.draw(odd_parts().filter(lambda graph: graph.edges))
    graph.node_time, graph.edge_time = {}, {}
    seeds, _, fanouts = data.draw(odd_requests(graph))
    rows, folder = make_rows(graph), tmp_path_factory.mktemp("p") / "p"
    write(folder, graph, num_parts, rows, data.draw(st.sampled_from(["hash", "range"])))

    recipe = GeneralRecipe(fanouts, disjoint=disjoint)
    results = sample_with_rows(folder, [(seeds, {})] * (num_parts - 1), recipe, num_parts, device)

    for samples, *_ in results:
        check(samples, graph, rows)


@ON_GPU_PLANS
@pytest.mark.parametrize(("num_parts", "method"), [(2, "hash"), (4, "range")])
@pytest.mark.parametrize("beside", [False, True])
def test_rows_that_are_copied_are_not_sent(tmp_path, device, num_parts, method, beside):
    graph = make_parts()
    rows, requests = make_rows(graph), make_requests(num_parts)
    write(tmp_path / "p", graph, num_parts, rows, method)
    # The first rank copies all rows of all types, the second none, others some.
    copied = [{kind: torch.arange(0 if rank == 1 else size)[:: 1 + rank] for kind, size in graph.num_nodes.items()}
              for rank in range(num_parts)]  # fmt: skip

    results = sample_with_rows(tmp_path / "p", requests, GeneralRecipe(FANOUTS), num_parts, device,
                               beside=beside and device.type == "cpu", copied=copied)  # fmt: skip

    books = GraphPart(tmp_path / "p", 0, device=torch.device("cpu")).books
    for rank, ((*samples, num_kept), num_remote, plan, _) in enumerate(results):
        check(samples, graph, rows)
        assert plan.room == results[0][2].room
        others = [(kind, int(node)) for sample in samples for kind, ids in sample.node.items() for node in ids.tolist()
                  if int(books[kind].owners(torch.tensor([node]))) != rank]  # fmt: skip
        here = [(kind, node) for kind, node in others if node in copied[rank][kind].tolist()]
        assert (num_remote, num_kept) == (len(others) - len(here), len(here))
    assert results[0][1] == 0 < results[0][0][-1]


@ON_GPU_PLANS
def test_all_ranks_fetch_again_what_one_has_no_room_for(tmp_path, device, monkeypatch):
    graph = make_parts()
    rows = make_rows(graph)
    write(tmp_path / "p", graph, 2, rows)
    monkeypatch.setattr(captured_rows, "_FIRST_ROWS", 1)

    # The second rank has no seeds, and answers.
    results = sample_with_rows(tmp_path / "p", make_requests(1), GeneralRecipe(FANOUTS), 2, device,
                               beside=device.type == "cpu")  # fmt: skip

    for samples, _, plan, _ in results:
        check(samples, graph, rows)
        assert plan.room == results[0][2].room
        assert max(plan.room.rows.others) > 1
        assert max(plan.room.rows.own) > 1


@ON_GPU_PLANS
def test_rows_take_one_exchange_of_ids_and_needs_and_one_for_each_attribute(tmp_path, device):
    graph = make_parts()
    rows = make_rows(graph)
    write(tmp_path / "p", graph, 2, rows)

    def run(transport):
        part, comm = GraphPart(tmp_path / "p", transport.rank, device=device), LockstepCommunicator(transport)
        plan = PartPlan(part, GeneralRecipe(FANOUTS), comm, timed=False, weighted=False, rows=RowExchange(part, comm))
        seeds = as_tensors(make_requests(2)[transport.rank][0], device)
        plan.sample(seeds, KEY)
        before, slots = transport.num_exchanges, list(plan._find_captured()._slots)
        plan.sample(seeds, KEY)
        count, is_kept = transport.num_exchanges - before, plan._find_captured()._slots == slots
        # A table that lies elsewhere is not read by the graphs of before.
        feature = plan._find_captured().node_rows.attributes[0].feature
        feature.stored.own_rows()
        sample = plan.sample(seeds, KEY)
        check([sample], graph, rows)
        return count, is_kept, plan._find_captured()._slots != slots

    num_attributes = sum(len(own) for own in rows.values())
    assert run_lockstep(run, 2) == [(2 * len(FANOUTS) + 1 + num_attributes, True, True)] * 2


@ON_GPU_PLANS
def test_rows_that_kernels_alone_do_not_read_come_after_the_batch(tmp_path, device):
    graph = make_parts()
    write(tmp_path / "p", graph, 2, make_rows(graph))

    def run(transport):
        part, comm = GraphPart(tmp_path / "p", transport.rank, device=device), LockstepCommunicator(transport)
        rows = RowExchange(part, comm)
        if transport.rank == 1:
            # Of this rank alone.
            rows.find_captured = lambda: None
        plan = PartPlan(part, GeneralRecipe(FANOUTS), comm, timed=False, weighted=False, rows=rows)
        return plan.sample(as_tensors(make_requests(2)[transport.rank][0], device), KEY).rows

    assert run_lockstep(run, 2) == [None, None]


@pytest.mark.gpu
def test_exchanges_of_rows_are_captured(tmp_path):
    graph = make_parts()
    rows, device = make_rows(graph), torch.device("cuda")
    write(tmp_path / "p", graph, 1, rows)
    part = GraphPart(tmp_path / "p", 0, device=device)
    segments = NcclSegments.open(dist.HashStore(), 0, 1, device, timeout=60)
    # Hot rows in GPU memory, the others on the host.
    features = {kind: {name: Feature(device=device, device_cache_size="50%", hotness=torch.arange(len(rows))
                                     ).from_cpu_tensor(rows) for name, rows in table.rows.items()}
                for kind, table in part.tables.items()}  # fmt: skip
    plan = GeneralPlan(part.place(), GeneralRecipe(FANOUTS))
    own = ExchangePlan(part, plan, segments, CapturedRows(part, features))

    for number, (seeds, _) in enumerate(make_requests(4)):
        check(own.sample([(as_tensors(seeds, device), None)], [KEY + number]), graph, rows)
    assert all(slot.graph is not None for slot in own._slots)
    # Written rows are read.
    features["paper"]["x"].update_(torch.arange(40), torch.arange(120.0).view(40, 3))
    rows["paper"]["x"] = torch.arange(120.0).view(40, 3)
    check(own.sample([(as_tensors(make_requests(1)[0][0], device), None)], [KEY]), graph, rows)
    segments.close()
    assert own._slots == []
