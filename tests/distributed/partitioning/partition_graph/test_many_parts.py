"""Partitions of more parts than a process may have files open."""

import resource

import numpy as np
import pytest
import torch.multiprocessing as mp

from pyg_direct.distributed.partitioning import partition_graph as steps
from pyg_direct.distributed.partitioning.files import Journal
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from tests.distributed.partitions import collect_rows, list_rows, read_manifest
from tests.processes import start_method

NODES, EDGES, PARTS, MOST_OPEN = 600, 4000, 400, 128


def make_edges():
    return np.random.default_rng(0).integers(0, NODES, (2, EDGES))


def write_with_few_files(folder, fatal=None):
    """Write a partition in a process that may have `MOST_OPEN` files open; leave it at note `fatal`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN, MOST_OPEN))
    steps._MOST_PIECE, steps._NOTE_EVERY = 150, 2
    note, notes = Journal.note, []

    def count(self, step, value):
        note(self, step, value)
        notes.append(step)
        if len(notes) == fatal:
            raise KeyboardInterrupt

    Journal.note = count
    try:
        partition_graph(folder, make_edges(), PARTS, node_rows={"x": np.arange(2.0 * NODES).reshape(-1, 2)},
                        edge_weight=np.ones(EDGES), edge_rows={"e": np.arange(EDGES)})  # fmt: skip
    except KeyboardInterrupt:
        assert fatal is not None


def apart(_, *args):
    write_with_few_files(*args)


@pytest.mark.slow
@pytest.mark.parametrize("fatal", [None, 6])
def test_more_parts_than_files_may_be_open(tmp_path, fatal):
    for stop in {None: [None], 6: [6, None]}[fatal]:
        mp.start_processes(apart, args=(tmp_path / "p", stop), nprocs=1, start_method=start_method())

    assert collect_rows(tmp_path / "p", NODES) == list_rows(*make_edges(), NODES)
    Manifest.read(tmp_path / "p").check(tmp_path / "p", None)
    assert sum(nodes for (nodes,) in read_manifest(tmp_path / "p")["part_nodes"]) == NODES
    for part in (0, PARTS - 1):
        base = tmp_path / f"p/part-{part:05d}"
        assert np.load(base / "node-0.rows-0.npy")[:, 0].tolist() == (2 * np.load(base / "node-0.ids.npy")).tolist()
