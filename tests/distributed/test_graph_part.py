"""Files of a part that have their size, and hold what nobody wrote, are named before anything is read by them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_direct import sampling
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import PartitionError
from pyg_direct.graph.hetero_topo import HeteroTopo
from tests.distributed.partitions import NODES

CPU = torch.device("cpu")


def put(folder, name, place, value):
    """Write one number of a file anew."""
    array = np.load(folder / "part-00001" / name)
    array[place] = value
    np.save(folder / "part-00001" / name, array)


@pytest.mark.parametrize(("name", "place", "value", "words"), [
    ("edge-0.indices.npy", 7, 10**9, rf"must hold \d+ ids in \[0, {NODES}\)"),
    ("edge-0.indices.npy", -1, -1, rf"must hold \d+ ids in \[0, {NODES}\)"),
    ("edge-0.indptr.npy", 3, 10**9, r"must hold \d+ offsets that ascend from 0 to \d+"),
    ("edge-0.indptr.npy", 0, 1, r"must hold \d+ offsets that ascend from 0 to \d+"),
    ("edge-0.indptr.npy", -1, 0, r"must hold \d+ offsets that ascend from 0 to \d+"),
    ("node-0.ids.npy", -1, 10**9, rf"must hold ascending ids in \[0, {NODES}\)"),
    ("node-0.ids.npy", 1, 0, rf"must hold ascending ids in \[0, {NODES}\)"),
])  # fmt: skip
@pytest.mark.parametrize("read", [GraphPart.place, lambda part: part.edge_set(part.manifest.edges[0].name)],
                         ids=["sampled", "asked for pairs"])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, edges, name, place, value, words, read):
    partition_graph(tmp_path / "p", edges, 2, num_nodes=NODES)
    put(tmp_path / "p", name, place, value)

    with pytest.raises(PartitionError, match=f"part-00001/{name} {words}, and holds something else: it is damaged"):
        read(GraphPart(tmp_path / "p", 1, device=CPU))


def test_parts_without_nodes_or_edges_are_whole(tmp_path):
    partition_graph(tmp_path / "p", np.zeros((2, 0), np.int64), 3, num_nodes=1)

    parts = [GraphPart(tmp_path / "p", part, device=CPU) for part in range(3)]

    assert [part.place().rows.indices.numel() for part in parts] == [0, 0, 0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: m["nodes"][0]["book"].pop("file"), "lacks what version 1 holds: 'file'"),
    (lambda m: m["nodes"][0]["book"].update(file="other.npy"), "a table 'other.npy' for nodes 'nodes', which is not"),
    (lambda m: m["nodes"][0].update(book={"kind": "list"}), "a book of kind 'list' for nodes 'nodes'"),
    (lambda m: m["nodes"][0].update(book={"kind": "range"}), "bounds None for nodes 'nodes'"),
    (lambda m: m["nodes"][0].update(book={"kind": "range", "bounds": [0, "1"]}), r"bounds \[0, '1'\] for nodes"),
    (lambda m: m["nodes"][0].update(book=3), "lacks"),
    (lambda m: m["nodes"][0].update(num_nodes=NODES + 1), f"{NODES + 1} nodes 'nodes', of which parts have {NODES}"),
    (lambda m: m["part_nodes"].pop(), "nodes of 1 parts, of 2"),
    (lambda m: m["part_edges"].append([0]), "edges of 3 parts, of 2"),
    (lambda m: m["part_edges"][1].pop(), "lacks"),
    (lambda m: m["edges"][0].update(num_edges=3), r"3 edges 'nodes__to__nodes', of which parts have \d+"),
])  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_named(tmp_path, edges, change, words):
    partition_graph(tmp_path / "p", edges, 2, num_nodes=NODES, method="metis")
    path = tmp_path / "p" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))

    with pytest.raises(PartitionError, match=f"{path} .*{words}"):
        Manifest.read(tmp_path / "p")


def test_a_part_has_what_plans_read_of_a_graph(tmp_path, edges):
    texts = [file.read_text() for file in Path(sampling.__file__).parent.glob("*.py")]
    read = {name for text in texts for name in re.findall(r"\btopo\.(\w+)", text)}
    whole = HeteroTopo({"a": 3}, {("a", "to", "a"): torch.tensor([[0, 1], [1, 2]])})
    partition_graph(tmp_path / "p", edges, 2, num_nodes=NODES)

    part = GraphPart(tmp_path / "p", 0, device=CPU).place().topo

    known = read & vars(whole).keys()
    assert known >= {"id_bits", "type_starts", "row_starts"}
    assert all(hasattr(part, name) for name in known)
