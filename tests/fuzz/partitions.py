"""Partitions on disk: what they hold, what is sampled from them, and that damage is told."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet, table

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.partitioning.files import Journal
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import PartitionError
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.distributed.partitions import collect_rows, list_rows
from tests.distributed.threads import run_threads
from tests.fuzz.compare import assert_equal
from tests.fuzz.graphs import make_rows, make_types, to_edge_index
from tests.fuzz.neighbors import (
    OWN_WINDOWS,
    draw_fanouts,
    draw_times,
    expect_sample,
    sampling_arguments,
    sampling_options,
)
from tests.fuzz.space import Row, Space
from tests.reference.general import Parts


def space(device: str) -> Space:
    """The options of this subject."""
    left_out = ("graph", "reverses", "sorted", "sampling")
    sampling = {name: values for name, values in sampling_options().items() if name not in left_out}
    options = {**sampling, "method": ("hash", "range", "streaming", "given"), "parts": ("1", "2", "3"),
               "direction": ("in", "out"), "ids": ("int64", "int32"), "threads": ("one", "all"),
               "damage": ("none", "byte", "cut", "lost"), "source": ("tensor", "npy", "columns", "parquet"),
               "edge_rows": ("no", "yes"), "crash": ("no", "yes")}  # fmt: skip
    rules = (
        (("time", "window"), lambda time, window: time != "none" or window == "none"),
        (("time", "direction"), lambda time, direction: time == "none" or direction == "in"),
    )
    return Space(options, rules)


def run(row: Row, random: Random, device: str) -> int:
    """Check the files of a partition and batches that its parts sample together; returns the number of batches."""
    times = "" if row["time"] == "none" else row["time"]
    graph = make_types(random, times, row["weight"] == "yes")
    graph.direction = row["direction"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parts"
        rows, edge_rows = write(path, row, random, graph)
        check_files(path, graph, rows)
        check_edges(path, graph, edge_rows)
        batches = sample_parts(path, row, random, graph, device)
        if row["damage"] != "none":
            check_damage(path, row["damage"], random)
    return batches


class CrashError(Exception):
    """Ends a partitioning in its middle."""


def write_edges(path: Path, source: str, edges: torch.Tensor) -> Any:
    """Edges as a caller may give them: a tensor, or files beside the partition."""
    if source == "tensor":
        return edges
    path.parent.mkdir(parents=True, exist_ok=True)
    if source == "parquet":
        parquet.write_table(table({"s": edges[0].numpy(), "t": edges[1].numpy()}), path.with_suffix(".parquet"),
                            row_group_size=5)  # fmt: skip
        return path.with_suffix(".parquet")
    if source == "npy":
        np.save(path.with_suffix(".npy"), edges.numpy())
        return path.with_suffix(".npy")
    files = [path.with_suffix(f".{end}.npy") for end in (0, 1)]
    for file, ends in zip(files, edges, strict=True):
        np.save(file, ends.numpy())
    return tuple(files)


def write(path: Path, row: Row, random: Random, graph: Parts) -> tuple[dict[str, torch.Tensor], dict[Any, np.ndarray]]:
    """Partition the graph, after a crash somewhere on the way if the row says so; returns rows of nodes and edges."""
    count = int(row["parts"])
    method = row["method"]
    if method == "given":
        method = {kind: torch.tensor([random.randrange(count) for _ in range(size)])
                  for kind, size in graph.num_nodes.items()}  # fmt: skip
    rows = {kind: make_rows(random, size, 3) for kind, size in graph.num_nodes.items()}
    edges = {kind: write_edges(path.parent / f"edges-{number}", row["source"],
                               to_edge_index(pairs, getattr(torch, row["ids"])))
             for number, (kind, pairs) in enumerate(graph.edges.items())}  # fmt: skip
    edge_rows = {}
    if row["edge_rows"] == "yes":
        edge_rows = {kind: np.arange(2.0 * len(pairs)).reshape(-1, 2) + random.random()
                     for kind, pairs in graph.edges.items()}  # fmt: skip

    def tensors(parts: dict, dtype: torch.dtype = torch.int64) -> dict | None:
        return {kind: torch.tensor(values, dtype=dtype) for kind, values in parts.items()} or None

    make = partial(partition_graph, path, edges, count, num_nodes=graph.num_nodes, method=method,
                   direction=graph.direction, node_rows={kind: {"x": values} for kind, values in rows.items()},
                   edge_rows={kind: {"a": values} for kind, values in edge_rows.items()},
                   node_time=tensors(graph.node_time), edge_time=tensors(graph.edge_time),
                   edge_weight=tensors(graph.edge_weight, torch.float32))  # fmt: skip
    if row["crash"] == "yes":
        crash(make, random.randint(1, 12))
    if not path.exists():
        make()
    return rows, edge_rows


def crash(make: Callable[[], Any], fatal: int) -> None:
    """Partition until something has been noted so often that is not to be done again, if it ever is."""
    notes, note = itertools.count(1), Journal.note

    def note_or_crash(self: Journal, *args: Any) -> None:
        note(self, *args)
        if next(notes) == fatal:
            raise CrashError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CrashError):
        patch.setattr(Journal, "note", note_or_crash)
        make()


def check_files(path: Path, graph: Parts, rows: dict[str, torch.Tensor]) -> None:
    """Every row of every relation is there once, and every row of nodes lies with its node."""
    manifest = Manifest.read(path)
    manifest.check(path, None)
    kinds = [entry.name for entry in manifest.nodes]
    assert_equal("types", sorted(kinds), sorted(graph.num_nodes))
    for number, kind in enumerate(kinds):
        for part in path.glob("part-*"):
            ids = torch.from_numpy(np.load(part / f"node-{number}.ids.npy")).long()
            assert_equal(f"x of {kind}", torch.from_numpy(np.load(part / f"node-{number}.rows-0.npy")), rows[kind][ids])
    expanded, reached = (2, 0) if graph.direction == "in" else (0, 2)
    for number, entry in enumerate(manifest.edges):
        pairs = graph.edges[entry.name]
        time = graph.edge_time.get(entry.name)
        if time is None and entry.name[reached] in graph.node_time:
            time = [graph.node_time[entry.name[reached]][pair[reached // 2]] for pair in pairs]
        kind = entry.name[expanded]
        ends = [[pair[end] for pair in pairs] for end in ((0, 1) if graph.direction == "in" else (1, 0))]
        expected = list_rows(*ends, graph.num_nodes[kind], time)
        assert_equal(f"rows of {entry.name}", collect_rows(path, graph.num_nodes[kind], number, kinds.index(kind)),
                     expected)  # fmt: skip


def check_edges(path: Path, graph: Parts, edge_rows: dict[Any, np.ndarray]) -> None:
    """Times, weights and rows of edges lie with their edges."""
    for number, entry in enumerate(Manifest.read(path).edges):
        for part in path.glob("part-*"):
            ids = np.load(part / f"edge-{number}.ids.npy").tolist()
            for name, values in (("time", graph.edge_time), ("weight", graph.edge_weight)):
                if entry.name in values:
                    expected = [values[entry.name][edge] for edge in ids]
                    assert_equal(f"{name} of {entry.name}", np.load(part / f"edge-{number}.{name}.npy").tolist(),
                                 expected)  # fmt: skip
            if entry.name in edge_rows:
                in_order = np.load(part / f"edge-{number}.sorted.npy")
                assert_equal(f"edges of {entry.name}", in_order.tolist(), sorted(ids))
                assert_equal(f"rows of {entry.name}", np.load(part / f"edge-{number}.rows-0.npy").tolist(),
                             edge_rows[entry.name][in_order].tolist())  # fmt: skip


def sample_parts(path: Path, row: Row, random: Random, graph: Parts, device: str) -> int:
    """Batches that all parts sample together are those of the reference."""
    _, fanouts = draw_fanouts(row, random, graph)
    arguments = sampling_arguments(row)
    timed, weighted = bool(graph.node_time or graph.edge_time), bool(graph.edge_weight)
    names = ("replace", "disjoint", "subgraph_type", "temporal_strategy", "time_comparison", "time_window")
    manifest = Manifest.read(path)
    order = {entry.name: fanouts[entry.name] for entry in manifest.edges}
    recipe = GeneralRecipe(order, **{name: arguments[name] for name in names},
                           seed_windows=row["window"] == OWN_WINDOWS)  # fmt: skip
    count, steps = int(row["parts"]), 4
    parts = [GraphPart(path, part, device=torch.device(device)) for part in range(count)]
    for part in parts:
        part.place(timed=timed, weighted=weighted)
    requests = []
    for _ in range(count * steps):
        kinds = random.sample(sorted(graph.num_nodes), random.randint(1, 2))
        seeds = {kind: [random.randrange(graph.num_nodes[kind]) for _ in range(random.randint(0, 3))] for kind in kinds}
        times = {kind: draw_times(row, random, len(ids)) for kind, ids in seeds.items()} if timed else None
        requests.append((seeds, times, random.getrandbits(64)))

    def tensors(values: dict | None) -> dict | None:
        if values is None:
            return None
        return {kind: torch.tensor(ids, dtype=torch.int64, device=device) for kind, ids in values.items()}

    def tensors_of_times(values: dict | None) -> dict | None:
        found = tensors(values)
        if found is None or row["window"] != OWN_WINDOWS:
            return found
        return {kind: own.reshape(-1, 2) for kind, own in found.items()}

    def sample(communicator: object) -> list:
        rank = communicator.rank
        plan = PartPlan(parts[rank], recipe, communicator, timed=timed, weighted=weighted)
        return [plan.sample(tensors(seeds), key, seed_time=tensors_of_times(times))
                for seeds, times, key in requests[rank::count]]  # fmt: skip

    # Relations are numbered, and so draw, in the order of the files.
    ordered = replace(graph, edges={kind: graph.edges[kind] for kind in order},
                      num_nodes={entry.name: graph.num_nodes[entry.name] for entry in manifest.nodes})  # fmt: skip
    for rank, found in enumerate(run_threads(sample, count, torch.device(device))):
        for got, (seeds, times, key) in zip(found, requests[rank::count], strict=True):
            expected = expect_sample({**row, "graph": "hetero"}, ordered, seeds, fanouts, key, times)
            for name, value in vars(expected).items():
                have = getattr(got, name)
                if isinstance(have, dict):
                    have = {kind: part.tolist() if isinstance(part, torch.Tensor) else part
                            for kind, part in have.items()}  # fmt: skip
                assert_equal(name, have, value)
    return len(requests)


def check_damage(path: Path, damage: str, random: Random) -> None:
    """A file that is not as it was written is told by name."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "manifest.json"]
    file = random.choice([file for file in files if file.stat().st_size > 0])
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
    elif damage == "cut":
        os.truncate(file, random.randrange(len(content)))
    else:
        file.unlink()
    # Python keeps patterns for `match=`, of each folder another.
    with pytest.raises(PartitionError) as raised:
        Manifest.read(path).check(path, None)
    assert str(file) in str(raised.value), raised.value
