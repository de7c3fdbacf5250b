"""No file of a partition, nor of edges, is loaded as a pickle, whatever lies in the place of an array."""

import os
import pickle

import numpy as np
import pytest
import torch

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.distributed.partitioning.replicas import plan_replicas, read_replicas
from pyg_direct.errors import ArgumentError, PartitionError

NODES, EDGES = 60, 400


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def pack_bomb(path, form):
    """A file in the place of an array: a pickle, an array of objects, or an archive."""
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
        return
    with path.open("wb") as file:
        bomb = np.array([Bomb()], dtype=object)
        np.save(file, bomb, allow_pickle=True) if form == "objects" else np.savez(file, bomb)


def open_all(folder):
    """All that part 0 needs."""
    part = GraphPart(folder, 0, device=torch.device("cpu"), check=None)
    part.place(timed=True, weighted=True)
    part.edge_set(part.manifest.edges[0].name)
    read_replicas(folder, part.manifest, 0)


def test_no_pickle_is_loaded_in_the_place_of_any_array(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edges = np.random.default_rng(0).integers(0, NODES, (2, EDGES))
    folder, rows = tmp_path / "p", {"x": np.ones((NODES, 3), np.float32)}
    partition_graph(folder, edges, 2, method=np.arange(NODES) % 2, node_rows=rows, node_time=np.arange(NODES),
                    edge_rows={"e": np.ones((EDGES, 2))}, edge_weight=np.ones(EDGES, np.float32))  # fmt: skip
    plan_replicas(folder, {0: {"nodes": torch.ones(NODES)}}, 0.5)
    open_all(folder)
    files = sorted(file for file in folder.rglob("*.npy") if not file.parent.name.endswith("-00001"))
    refused = []
    for file in files:
        kept = file.read_bytes()
        for form in ("pickle", "objects", "archive"):
            pack_bomb(file, form)
            with pytest.raises(PartitionError) as caught:
                open_all(folder)
            refused.append(str(file) in str(caught.value))
        file.write_bytes(kept)

    assert len(files) > 8
    assert refused == [True] * 3 * len(files)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("form", ["pickle", "objects"])
def test_no_pickle_is_loaded_in_the_place_of_edges(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    pack_bomb(tmp_path / "edges.npy", form)

    with pytest.raises(ArgumentError, match=r"edges must be a whole NumPy array .*, got '.*edges.npy', which says"):
        partition_graph(tmp_path / "p", tmp_path / "edges.npy", 2)

    assert not (tmp_path / "exploded").exists()
