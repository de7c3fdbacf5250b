"""Rows of a `Feature` from memory or a file, read, updated and renamed, beside a table in NumPy."""

from __future__ import annotations

import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from pyg_direct import CSRTopo, Feature, save_rows
from tests.features.contract import bytes_of, make_rows
from tests.fuzz.graphs import make_edges, to_edge_index
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import STORED
from tests.poison import poisoned_memory
from tests.reference.narrow import narrow

DTYPES = ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64",
          "float8_e4m3fn")  # fmt: skip
SHAPES = {"scalar": (), "one": (1,), "odd": (7,), "wide": (33,), "line": (32,), "matrix": (2, 3), "nothing": (0,)}
CACHES = {"none": 0, "some": "20%", "most": "70%", "all": "1G"}


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "source": ("tensor", "npy", "safetensors", "bytes", "mmap", "strided"), "dtype": DTYPES, "row": tuple(SHAPES),
        "store": tuple(STORED), "cache": tuple(CACHES), "host_cache": tuple(CACHES), "order": ("no", "yes"),
        "ids": ("int64", "int32", "list"), "hotness": ("degree", "graph", "scores"), "count": ("40", "1", "0"),
        "served": ("no", "yes"), "placement": ("unified", "pinned"), "threads": ("one", "all"),
    }  # fmt: skip
    rules = (
        (("store", "dtype"), lambda store, dtype: store == "none" or dtype == "float32"),
        (("store", "source"), lambda store, source: store == "none" or source in ("tensor", "strided")),
        (("source", "host_cache"), lambda source, cache: source not in ("tensor", "strided") or cache == "none"),
        # NumPy has no such numbers.
        (("source", "dtype"), lambda source, dtype: source not in ("npy", "mmap") or "float" not in dtype
         or dtype in ("float16", "float32", "float64")),
        (("source", "count"), lambda source, count: source != "mmap" or count != "0"),
        (("source", "row"), lambda source, row: source != "mmap" or row != "nothing"),
    )  # fmt: skip
    return Space(options, rules)


def open_feature(row: Row, random: Random, rows: Tensor, feature: Feature, folder: Path) -> Feature:
    """The feature with these rows from where they come."""
    source = row["source"]
    if source == "strided":
        wide = torch.stack([rows, rows], dim=1)
        return feature.from_cpu_tensor(wide[:, 0])
    if source == "tensor":
        return feature.from_cpu_tensor(rows.clone())
    if source == "safetensors":
        return feature.from_file(save_rows(folder / "rows.safetensors", rows))
    if source == "bytes":
        skipped = random.choice([0, 64])
        (folder / "rows.bin").write_bytes(bytes(skipped) + bytes_of(rows).numpy().tobytes())
        return feature.from_file(folder / "rows.bin", dtype=rows.dtype, shape=rows.shape, offset=skipped)
    path = save_rows(folder / "rows.npy", rows)
    return feature.from_file(path) if source == "npy" else feature.from_mmap(np.load(path, mmap_mode="r"))


def run(row: Row, random: Random, device: str) -> int:
    """Check what is read after each of some changes; returns the number of reads."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(row, random, device, Path(folder))


def run_in(row: Row, random: Random, device: str, folder: Path) -> int:
    """The same with a folder for files."""
    count, dtype, shape = int(row["count"]), getattr(torch, row["dtype"]), SHAPES[row["row"]]
    stored = STORED[row["store"]]

    def make(number: int) -> Tensor:
        if stored is None:
            return make_rows(number, shape, dtype)
        return torch.randn(number, *shape) * 2.0 ** random.randint(-12, 12)

    rows = make(count)
    topology = None
    if row["hotness"] == "graph":
        edges = make_edges(random, count, count, 90)
        topology = CSRTopo(to_edge_index(edges), num_nodes=count)
    hotness = torch.rand(count) if row["hotness"] == "scores" else "degree"
    feature = Feature(device=device, device_cache_size=CACHES[row["cache"]], host_cache_size=CACHES[row["host_cache"]],
                      csr_topo=topology, hotness=hotness, store_dtype=stored, placement=row["placement"])  # fmt: skip
    feature = open_feature(row, random, rows, feature, folder)
    table = expect_stored(rows, stored)
    assert (feature.shape, feature.dtype) == (rows.shape, dtype)
    if row["served"] == "yes":
        feature.count_served()
    if row["order"] == "yes":
        # The id `order[i]` is that of row i.
        order = torch.randperm(count)
        feature.set_local_order(order)
        named = table.clone()
        named[order] = table
        table = named
    in_file = feature.placement == "mmap"
    reads, asked = 6, 0
    for _ in range(reads):
        ids = [random.randrange(count) for _ in range(random.choice([0, 1, 5, 200]))] if count else []
        with poisoned_memory():
            got = feature[read_ids(row, ids)]
            again = feature.read(torch.tensor(ids, dtype=torch.int64, device=device))
        expected = table[torch.tensor(ids, dtype=torch.int64)]
        for found in (got, again):
            assert (found.dtype, found.shape) == (dtype, expected.shape), f"{found.dtype} {found.shape}"
            assert torch.equal(bytes_of(found), bytes_of(expected)), f"rows of {ids}"
        asked += 2 * len(ids)
        if not in_file and count:
            changed = [random.randrange(count) for _ in range(random.choice([0, 1, 7]))]
            new = make(len(changed))
            feature.update_(read_ids(row, changed), new)
            # Of an id that comes several times, the last row counts.
            for place, item in enumerate(changed):
                table[item] = expect_stored(new, stored)[place]
        if row["served"] == "yes":
            assert_served(feature, asked)
    return 2 * reads


def assert_served(feature: Feature, asked: int) -> None:
    """The tiers have served as many rows as were asked for."""
    with redirect_stdout(StringIO()):
        served = feature.report().num_read
    assert served == asked, f"{served} rows served, {asked} asked for"


def expect_stored(rows: Tensor, stored: torch.dtype | None) -> Tensor:
    """The rows as they are read again."""
    if stored is None:
        return rows.clone()
    if not rows.numel():
        return rows.clone()
    flat = rows.reshape(len(rows), -1).double().tolist()
    return torch.tensor([narrow(row, str(stored).removeprefix("torch.")) for row in flat]).view(rows.shape)


def read_ids(row: Row, ids: list[int]) -> Tensor | list[int]:
    """Ids as a caller may give them."""
    return ids if row["ids"] == "list" else torch.tensor(ids, dtype=getattr(torch, row["ids"]))
