"""Partitions on disk: whole, as the format says, in bounded memory, and resumed after a crash."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning import partition_graph as steps
from pyg_direct.distributed.partitioning.files import Journal
from pyg_direct.distributed.partitioning.manifest import Book, Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import ArgumentError, PartitionError
from tests.distributed.partitions import EDGES, NODES, collect_rows, list_rows, read_manifest


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(steps, "_MOST_PIECE", 17)
    monkeypatch.setattr(steps, "_NOTE_EVERY", 2)


def communities(num_nodes=2000, num_groups=8, degree=10, seed=0):
    """Edges that mostly stay within groups."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, num_groups, num_nodes)
    members = [np.flatnonzero(group == g) for g in range(num_groups)]
    sources = rng.integers(0, num_nodes, num_nodes * degree)
    inside = np.array([members[group[s]][rng.integers(len(members[group[s]]))] for s in sources])
    stray = rng.random(len(sources)) < 0.05
    return np.stack([sources, np.where(stray, rng.integers(0, num_nodes, len(sources)), inside)])


@pytest.mark.parametrize("method", ["hash", "range", "metis", "streaming", "given"])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_every_node_and_edge_is_in_one_part(tmp_path, edges, method, num_parts):
    given = np.arange(NODES) % num_parts

    partition_graph(tmp_path / "p", edges, num_parts, method=given if method == "given" else method)

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)
    manifest = Manifest.read(tmp_path / "p")
    manifest.check(tmp_path / "p", None)
    book = manifest.read_book(tmp_path / "p", 0)
    owners = book.owners(torch.arange(NODES)).numpy()
    for part in range(num_parts):
        ids = np.load(tmp_path / f"p/part-{part:05d}/node-0.ids.npy")
        assert ids.tolist() == np.flatnonzero(owners == part).tolist()
    assert manifest.num_cut == (owners[edges[0]] != owners[edges[1]]).sum()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["p"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.data())
def test_odd_graphs(tmp_path_factory, num_nodes, num_parts, data):
    ends = st.integers(0, max(0, num_nodes - 1))
    count = data.draw(st.integers(0, 30 if num_nodes else 0))
    edges = np.array(data.draw(st.lists(st.tuples(ends, ends), min_size=count, max_size=count)), np.int32)
    folder = tmp_path_factory.mktemp("p") / "p"

    partition_graph(folder, edges.reshape(-1, 2).T, num_parts, num_nodes=num_nodes,
                    method=data.draw(st.sampled_from(["hash", "range", "streaming"])))  # fmt: skip

    assert collect_rows(folder, num_nodes) == list_rows(*edges.reshape(-1, 2).T, num_nodes)


def test_rows_times_and_weights_follow_their_nodes_and_edges(tmp_path, edges):
    rng = np.random.default_rng(1)
    x, weight, attr = rng.random((NODES, 3), np.float32), rng.random(EDGES), rng.integers(0, 99, (EDGES, 2))
    time = rng.integers(0, 9, EDGES)

    partition_graph(tmp_path / "p", edges, 3, node_rows={"x": x}, edge_rows={"edge_attr": attr}, edge_time=time,
                    edge_weight=weight, memory="16M")  # fmt: skip

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES, time)
    for part in range(3):
        base = tmp_path / f"p/part-{part:05d}"
        ids, in_order = np.load(base / "edge-0.ids.npy"), np.load(base / "edge-0.sorted.npy")
        assert np.array_equal(np.load(base / "node-0.rows-0.npy"), x[np.load(base / "node-0.ids.npy")])
        assert np.array_equal(np.load(base / "edge-0.time.npy"), time[ids])
        assert np.array_equal(np.load(base / "edge-0.weight.npy"), weight[ids])
        assert in_order.tolist() == sorted(ids.tolist())
        assert np.array_equal(np.load(base / "edge-0.rows-0.npy"), attr[in_order])


def test_files_are_as_the_format_says_whatever_is_given(tmp_path, edges):
    x, a, time = np.random.default_rng(0).random((NODES, 2)), np.arange(EDGES), np.arange(NODES)
    given = {"node_rows": {"x": x.astype(">f8")}, "edge_rows": {"a": a.astype(">i4")}, "node_time": time.astype(">i4")}

    partition_graph(tmp_path / "p", edges.astype(">i8"), 2, **given)

    for number in range(2):
        part = GraphPart(tmp_path / "p", number, device=torch.device("cpu"))
        nodes, links = part.tables.values()
        assert np.array_equal(nodes.rows["x"], x[nodes.ids])
        assert np.array_equal(links.rows["a"], a[links.ids])
        assert part.times["nodes"].dtype == torch.int64
        assert np.array_equal(part.times["nodes"], time[nodes.ids])


def test_rows_are_sorted_by_the_times_of_neighbors(tmp_path, edges):
    time = np.random.default_rng(1).integers(0, 9, NODES)

    partition_graph(tmp_path / "p", edges, 2, node_time=time)

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES, time[edges[0]])


@pytest.mark.parametrize("method", ["hash", "range", "streaming", "metis"])
def test_graphs_with_types(tmp_path, method):
    rng = np.random.default_rng(0)
    writes = np.stack([rng.integers(0, 20, 90), rng.integers(0, 30, 90)])
    cites = rng.integers(0, 30, (2, 70))
    relations = {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): cites}
    y = torch.arange(30)

    options = {"num_nodes": {"author": 25}, "node_rows": {"paper": {"y": y}}, "method": method}
    partition_graph(tmp_path / "p", relations, 3, **options)

    manifest = read_manifest(tmp_path / "p")
    assert [(n["name"], n["num_nodes"]) for n in manifest["nodes"]] == [("author", 25), ("paper", 30)]
    assert collect_rows(tmp_path / "p", 30, 0, 1) == list_rows(*writes, 30)
    assert collect_rows(tmp_path / "p", 30, 1, 1) == list_rows(*cites, 30)


def test_rows_of_a_part_larger_than_memory_are_made_piece_by_piece(tmp_path, edges, monkeypatch):
    partition_graph(tmp_path / "whole", edges, 2, edge_time=np.arange(EDGES)[::-1].copy())
    monkeypatch.setattr(steps, "_EDGE_BYTES", 1 << 20)

    partition_graph(tmp_path / "pieces", edges, 2, edge_time=np.arange(EDGES)[::-1].copy(), memory="16M")

    assert read_manifest(tmp_path / "pieces") == read_manifest(tmp_path / "whole")


@pytest.mark.parametrize("form", ["npy", "columns", "parquet", "folder"])
def test_files_of_edges(tmp_path, edges, form):
    from pyarrow import parquet, table

    path = tmp_path / "edges"
    if form == "npy":
        path = tmp_path / "edges.npy"
        np.save(path, edges.T.copy())
    elif form == "columns":
        path = (tmp_path / "a.npy", tmp_path / "b.npy")
        for file, end in zip(path, edges, strict=True):
            np.save(file, end.astype(np.int32))
    else:
        path.mkdir()
        for number, part in enumerate(np.array_split(edges, 3, axis=1)):
            parquet.write_table(table({"s": part[0], "t": part[1]}), path / f"{number}.parquet", row_group_size=50)
        if form == "parquet":
            parquet.write_table(table({"s": edges[0], "t": edges[1]}), tmp_path / "e.parquet", row_group_size=50)
            path = tmp_path / "e.parquet"

    partition_graph(tmp_path / "p", path, 2)

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)


@pytest.mark.parametrize("method", ["hash", "range", "streaming", "metis"])
def test_names_become_numbers(tmp_path, method):
    from pyarrow import parquet, table

    users, items = ["ann", "bob", "ann", "eve"], ["tea", "tea", "milk", "rum"]
    parquet.write_table(table({"u": users, "i": items}), tmp_path / "e.parquet")

    partition_graph(tmp_path / "p", {("user", "buys", "item"): tmp_path / "e.parquet"}, 2, method=method)

    names = [parquet.read_table(tmp_path / f"p/names-{kind}.parquet")["name"].to_pylist() for kind in (0, 1)]
    rows = collect_rows(tmp_path / "p", 3, 0, 1)
    found = {(names[0][user], names[1][item]) for item, (own, _) in enumerate(rows) for user in own}
    assert found == set(zip(users, items, strict=True))
    assert sorted(names[0]) == ["ann", "bob", "eve"]
    # Ids are all that a part reads.
    (tmp_path / "p/names-0.parquet").unlink()
    Manifest.read(tmp_path / "p").check(tmp_path / "p", 0)


class CrashError(Exception):
    pass


@pytest.mark.parametrize("method", ["hash", "streaming"])
def test_goes_on_after_a_crash_at_any_note(tmp_path, edges, monkeypatch, method):
    np.save(tmp_path / "edges.npy", edges)
    x, ones, ids = np.random.default_rng(1).random((NODES, 2)), np.ones(EDGES), np.arange(EDGES)
    arguments = {"node_rows": {"x": x}, "edge_weight": ones, "edge_rows": {"a": ids}, "method": method}
    partition_graph(tmp_path / "whole", tmp_path / "edges.npy", 2, **arguments)
    note, last = Journal.note, 0

    for fatal in range(1, 100):
        notes, out = [], tmp_path / f"p{fatal}"

        def crash(self, step, value, notes=notes, fatal=fatal):
            note(self, step, value)
            notes.append(step)
            if len(notes) == fatal:
                raise CrashError

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "note", crash)
            try:
                partition_graph(out, tmp_path / "edges.npy", 2, **arguments)
                break
            except CrashError:
                assert not out.exists()
        with monkeypatch.context() as patch:
            done = []

            def count(self, step, value, done=done):
                done.append(step)
                note(self, step, value)

            patch.setattr(Journal, "note", count)
            partition_graph(out, tmp_path / "edges.npy", 2, **arguments)
        assert read_manifest(out) == read_manifest(tmp_path / "whole")
        last = len(done)

    assert fatal > 8
    # Next to nothing is done again after the last crash.
    assert last <= 2


def test_what_is_published_is_there_however_soon_a_crash_comes(tmp_path, edges, monkeypatch):
    def crash(folder):
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", crash)
        with pytest.raises(CrashError):
            partition_graph(tmp_path / "p", edges, 2)

    Manifest.read(tmp_path / "p").check(tmp_path / "p", None)
    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_half_a_journal_is_none(tmp_path, edges, text):
    (tmp_path / "p.partial").mkdir()
    (tmp_path / "p.partial/journal.json").write_text(text)

    partition_graph(tmp_path / "p", edges, 2)

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)


def test_other_inputs_begin_anew(tmp_path, edges, monkeypatch):
    def crash(*_):
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(steps.EdgeBuckets, "compress", crash)
        with pytest.raises(CrashError):
            partition_graph(tmp_path / "p", edges, 2)
    other = edges[::-1].copy()

    partition_graph(tmp_path / "p", other, 2)

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*other, NODES)


MAPPED = {
    "ends": lambda m: ({"edges": (m[0], m[1])}, {"edges": (m[1], m[0])}),
    "slices": lambda m: ({"node_rows": {"x": m[0, :NODES]}}, {"node_rows": {"x": m[0, NODES : 2 * NODES]}}),
    "meaning": lambda m: ({"edge_weight": m[0]}, {"edge_time": m[0]}),
}


@pytest.mark.parametrize("case", MAPPED)
def test_other_pieces_of_a_file_begin_anew(tmp_path, edges, monkeypatch, case):
    np.save(tmp_path / "edges.npy", edges)
    first, second = MAPPED[case](np.load(tmp_path / "edges.npy", mmap_mode="r"))
    with monkeypatch.context() as patch:
        patch.setattr(steps.EdgeBuckets, "compress", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            partition_graph(tmp_path / "p", **{"edges": edges, "num_parts": 2, **first})

    manifest = partition_graph(tmp_path / "p", **{"edges": edges, "num_parts": 2, **second})

    assert manifest == partition_graph(tmp_path / "other", **{"edges": edges, "num_parts": 2, **second})


def test_one_at_a_time_writes_a_partition(tmp_path, edges, monkeypatch):
    compress, errors = steps.EdgeBuckets.compress, []

    def write_too(*args):
        # Where this one is in its middle, another process would be begun.
        with pytest.raises(ArgumentError) as raised:
            partition_graph(tmp_path / "p", edges, 2)
        errors.append(str(raised.value))
        compress(*args)

    monkeypatch.setattr(steps.EdgeBuckets, "compress", write_too)

    partition_graph(tmp_path / "p", edges, 2)

    assert len(errors) == 2
    assert all("out must not be written by anybody else meanwhile" in error for error in errors)
    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_streaming_and_metis_cut_less_than_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "_MOST_PIECE", 1 << 20)
    edges = communities()

    cut = {method: partition_graph(tmp_path / method, edges, 4, method=method) for method in
           ("hash", "streaming", "metis")}  # fmt: skip

    assert cut["streaming"].num_cut < 0.5 * cut["hash"].num_cut
    assert cut["metis"].num_cut < 0.2 * cut["hash"].num_cut
    for manifest in cut.values():
        nodes = [counts[0] for counts in manifest.part_nodes]
        assert max(nodes) < 1.2 * sum(nodes) / 4


def test_metis_cuts_as_pymetis_does_when_called_directly(tmp_path, monkeypatch):
    import pymetis

    monkeypatch.setattr(steps, "_MOST_PIECE", 1 << 20)
    edges = communities(seed=3)
    neighbors = [set() for _ in range(2000)]
    for a, b in edges.T.tolist():
        if a != b:
            neighbors[a].add(b)
            neighbors[b].add(a)
    parts = np.array(pymetis.part_graph(4, adjacency=[sorted(own) for own in neighbors])[1])

    manifest = partition_graph(tmp_path / "p", edges, 4, method="metis")

    assert manifest.num_cut <= 1.05 * (parts[edges[0]] != parts[edges[1]]).sum()


@pytest.mark.parametrize(("damage", "words"), [
    (lambda p: (p / "part-00001/edge-0.indices.npy").unlink(), "is missing"),
    (lambda p: os.truncate(p / "part-00001/edge-0.indices.npy", 100), "must have .* bytes, got 100"),
    (lambda p: _flip(p / "part-00001/edge-0.indices.npy"), "checksum"),
    (lambda p: (p / "manifest.json").write_text("{"), "no JSON"),
    (lambda p: (p / "manifest.json").unlink(), "cannot be read"),
    (lambda p: (p / "manifest.json").write_text('{"format": "other"}'), "must have the format"),
    (lambda p: _edit(p, version=9), "must have version 1, got 9"),
    (lambda p: _edit(p, num_cut=None, drop="num_parts"), "lacks"),
])  # fmt: skip
def test_damage_is_named(tmp_path, edges, damage, words):
    partition_graph(tmp_path / "p", edges, 2)
    damage(tmp_path / "p")

    with pytest.raises(PartitionError, match=words):
        Manifest.read(tmp_path / "p").check(tmp_path / "p", 1)


def _flip(path):
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


def _edit(folder, drop=None, **values):
    found = {**read_manifest(folder), **values}
    found.pop(drop, None)
    (folder / "manifest.json").write_text(json.dumps(found))


@pytest.mark.parametrize("check", ["ful", True, False])
def test_files_are_compared_in_known_ways(tmp_path, edges, check):
    partition_graph(tmp_path / "p", edges, 2)

    with pytest.raises(ArgumentError, match="check must be 'full', 'size' or None, got"):
        GraphPart(tmp_path / "p", 0, device=torch.device("cpu"), check=check)


def test_a_part_missing_elsewhere_does_not_matter(tmp_path, edges):
    partition_graph(tmp_path / "p", edges, 2)
    (tmp_path / "p/part-00000/edge-0.ids.npy").unlink()

    Manifest.read(tmp_path / "p").check(tmp_path / "p", 1)


def test_books_agree_with_their_format():
    ids = torch.arange(1000)

    owners = Book(1000, 7).owners(ids)

    def mix(x):
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % 2**64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB % 2**64
        return (((x >> 32) & 0x7FFFFFFF) * 7) >> 31

    assert owners.tolist() == [mix(x) for x in range(1000)]
    assert torch.bincount(owners).min() > 100
