"""Copies of rows of other parts: which are kept, and what they save."""

import shutil
import threading

import numpy as np
import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning import replicas
from pyg_direct.distributed.partitioning.files import write_array
from pyg_direct.distributed.partitioning.manifest import Book, Manifest
from pyg_direct.distributed.partitioning.replicas import (
    AccessCounter,
    choose_replicas,
    count_listed,
    plan_replicas,
    read_replicas,
)
from pyg_direct.distributed.row_exchange import RowExchange, Wanted
from pyg_direct.errors import ArgumentError, ArgumentTypeError, PartitionError, PygDirectError
from tests.distributed.ranks import open_graph, write_data
from tests.distributed.threads import run_threads
from tests.processes import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, data):
    write_data(tmp_path / "p", data, 2)
    return tmp_path / "p"


def test_nodes_are_counted_where_lists_name_them(folder, data):
    parts = [GraphPart(folder, part, device=CPU) for part in range(2)]

    counts = sum(count_listed(part, "nodes") for part in parts)

    assert torch.equal(counts, torch.bincount(data.edge_index[0], minlength=300))


def test_the_most_listed_of_others_are_kept_within_the_bytes(folder):
    part = GraphPart(folder, 0, device=CPU)
    counts, row_bytes = count_listed(part, "nodes"), 5 * 4 + 8 + 1 + 8

    kept = choose_replicas(part, 20 * row_bytes + 3)["nodes"]

    others = part.owners("nodes", torch.arange(300)) != 0
    assert kept.numel() == 20
    assert others[kept].all()
    left = others.clone()
    left[kept] = False
    assert counts[kept].min() >= counts[left].max()
    assert choose_replicas(part, 0)["nodes"].numel() == 0


def test_a_plan_of_counted_access_is_written_and_read(folder, data):
    counters = {}
    for part in range(2):
        counters[part] = AccessCounter(300)
        seeds = torch.from_numpy(np.load(folder / f"part-{part:05d}/node-0.ids.npy"))
        for batch in NeighborLoader(data, [5, 3], seeds, batch_size=32, seed=part, device="cpu"):
            counters[part].add(batch)

    plan_replicas(folder, {part: counter.counts for part, counter in counters.items()}, 0.1)

    manifest, book = Manifest.read(folder), Book(300, 2)
    manifest.check(folder, None)
    for part in range(2):
        ids, met = read_replicas(folder, manifest, part)["nodes"], counters[part].counts["nodes"]
        assert ids.numel() == int(0.1 * manifest.part_nodes[part][0])
        assert (book.owners(ids) != part).all()
        others = book.owners(torch.arange(300)) != part
        assert met[ids].tolist() == met[others].sort(descending=True).values[: ids.numel()].tolist()


def plan(folder, share=0.1):
    plan_replicas(folder, {part: {"nodes": torch.arange(300) % 7} for part in range(2)}, share)


def test_a_plan_hides_no_damage(folder):
    path = folder / "part-00001/edge-0.indices.npy"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)

    plan(folder)

    with pytest.raises(PartitionError, match="checksum"):
        Manifest.read(folder).check(folder, None)


def test_processes_write_plans_of_their_parts_at_the_same_time(folder, monkeypatch):
    plan_replicas(folder, {part: {"nodes": torch.arange(300) % 7} for part in range(2)}, 0.1)
    write, others = replicas.write_array, []

    def write_beside(path, array):
        if not others:
            others.append(threading.Thread(target=plan_replicas, args=(folder, {1: {"nodes": torch.ones(300)}}, 0.5)))
            others[0].start()
            # Long enough for a plan that waits for nobody.
            others[0].join(0.5)
        write(path, array)

    monkeypatch.setattr(replicas, "write_array", write_beside)

    plan_replicas(folder, {0: {"nodes": torch.ones(300)}}, 0.5)

    others[0].join()
    manifest = Manifest.read(folder)
    for part in range(2):
        manifest.check(folder, part)
        assert len(read_replicas(folder, manifest, part)["nodes"]) > 30


def test_a_type_without_counts_keeps_none(folder):
    plan_replicas(folder, {0: {"nodes": torch.ones(300)}}, 0.5)

    plan_replicas(folder, {0: {}}, 0.5)

    assert read_replicas(folder, Manifest.read(folder), 0) == {}


def test_a_plan_that_is_interrupted_leaves_a_partition(folder, monkeypatch):
    plan(folder)

    def fail(*_):
        write_array(*_)
        raise KeyboardInterrupt

    monkeypatch.setattr(replicas, "write_array", fail)
    with pytest.raises(KeyboardInterrupt):
        plan(folder, 0.3)

    Manifest.read(folder).check(folder, None)
    GraphPart(folder, 0, device=CPU)
    monkeypatch.undo()
    plan(folder, 0.3)
    manifest = Manifest.read(folder)
    manifest.check(folder, None)
    assert "replicas-00000/node-0.npy" in manifest.files


def test_a_host_with_its_own_part_alone_has_a_plan(folder):
    plan(folder)
    for other in ("part-00000", "replicas-00000"):
        shutil.rmtree(folder / other)

    manifest = Manifest.read(folder)

    manifest.check(folder, 1)
    assert read_replicas(folder, manifest, 1)["nodes"].numel() > 0
    with pytest.raises(PartitionError, match="is missing"):
        manifest.check(folder, 0)


def test_kept_rows_are_not_fetched(folder, data):
    parts = [GraphPart(folder, part, device=CPU) for part in range(2)]
    ids = torch.arange(300)

    def run(comm):
        rows = RowExchange(parts[comm.rank], comm)
        rows.keep({"nodes": ids[::2]})
        found = rows.fetch([Wanted("nodes", ids, is_distinct=True)])[0]
        return found, rows.num_remote, rows.num_kept

    for rank, (found, num_remote, num_kept) in enumerate(run_threads(run, 2)):
        others = Book(300, 2).owners(ids) != rank
        assert all(torch.equal(found[name], data[name]) for name in found)
        assert (num_remote, num_kept) == (int(others[1::2].sum()), int(others[::2].sum()))


WRONG = [(True, "replicas must be a number of bytes or a string"), (0.2, "got 0.2: write '20%' for a share"),
         (torch.ones(300, dtype=torch.bool), "replicas must have dtype"),
         (torch.tensor([0.5]), "replicas must have dtype"), (torch.tensor([300]), r"replicas must lie in [0, 300)"),
         ({"paper": torch.arange(3)}, "replicas must name known node types")]  # fmt: skip


def open_with_copies(rank, folder):
    errors = []
    for wrong, _ in WRONG:
        try:
            open_graph(folder, replicas=wrong)
        except PygDirectError as error:
            errors.append(str(error))
    with open_graph(folder, replicas=[0, 1, 2, 3] if rank == 1 else None) as graph:
        rows = graph.run_in_turn(graph.rows.fetch, [Wanted("nodes", torch.arange(300), ["y"])])[0]["y"]
        kept = graph.rows.kept_bytes > 0
    with open_graph(folder, replicas="200%") as graph:
        # The other part holds about as many rows as this one: all that are listed are kept.
        assert graph.rows.kept_bytes == 37 * len(choose_replicas(graph.part, 1 << 40)["nodes"]) > 37 * 100
    return errors, kept, rows


def test_processes_choose_copies_of_their_own_and_hear_what_is_wrong(folder, data):
    ranks = run_ranks(open_with_copies, 2, folder)

    assert [keeps for _, keeps, _ in ranks] == [False, True]
    for errors, _, rows in ranks:
        assert torch.equal(rows, data.y)
        assert len(errors) == len(WRONG)
        assert all(words in error for error, (_, words) in zip(errors, WRONG, strict=True))


def test_errors_name_the_argument(folder):
    manifest = Manifest.read(folder)
    with pytest.raises(PartitionError, match="plan_replicas writes it"):
        read_replicas(folder, manifest, 0)
    with pytest.raises(ArgumentError, match="share must lie"):
        plan_replicas(folder, {}, -1)
    with pytest.raises(ArgumentError, match="counts must have shape"):
        plan_replicas(folder, {0: {"nodes": torch.zeros(3)}}, 0.1)
    with pytest.raises(ArgumentError, match=r"counts must name known node types, got 'papers' of \['nodes'\]"):
        plan_replicas(folder, {0: {"papers": torch.zeros(300)}}, 0.1)
    with pytest.raises(ArgumentError, match="part must be"):
        plan_replicas(folder, {2: {}}, 0.1)


def test_a_stray_file_makes_no_other_partition(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (folder / "copy.log").write_text("done")

    plan_replicas(folder, {part: {"nodes": torch.arange(300) % 7} for part in range(2)}, 0.1)

    manifest = Manifest.read(folder)
    assert manifest.identify() == Manifest.read(tmp_path / "copy").identify()
    assert any(name.startswith("replicas-") for name in manifest.files)
    assert "copy.log" not in manifest.files


def test_what_is_no_batch_is_refused():
    with pytest.raises(ArgumentTypeError, match="batch must be a Data or a HeteroData with n_id, got Tensor"):
        AccessCounter(3).add(torch.arange(3))
