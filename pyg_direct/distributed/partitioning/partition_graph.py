"""`partition_graph`: partitions a graph out of core, in bounded memory; continues after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pyg_direct.cache_folder import sync_folder
from pyg_direct.distributed.partitioning.builder import METHODS, Builder
from pyg_direct.distributed.partitioning.files import Journal
from pyg_direct.distributed.partitioning.inputs import read_inputs
from pyg_direct.distributed.partitioning.manifest import Manifest, check_num_parts
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.progress import announce
from pyg_direct.runtime.host.host_memory import parse_size
from pyg_direct.sampling.random_key import check_seed

_LEAST_MEMORY = 1 << 24


def partition_graph(
    out: str | PathLike[str],
    edges: Any,
    num_parts: int,
    *,
    num_nodes: int | Mapping[str, int | None] | None = None,
    method: str | Any = "hash",
    direction: str = "in",
    node_rows: Mapping[str, Any] | None = None,
    edge_rows: Mapping[Any, Any] | None = None,
    node_time: Any = None,
    edge_time: Any = None,
    edge_weight: Any = None,
    memory: int | str = "1G",
    seed: int = 0,
    progress: bool = False,
) -> Manifest:
    """Write a graph in `num_parts` parts into the folder `out`, in the format specified in `FORMAT.md`.

    A node belongs to one part, with its rows and its edges (the in-edges with `direction="in"`). Edges are read as a
    stream. Memory in addition to the given arrays is `memory`, 4 bytes a node mapped from disk, and the memory of the
    method. The folder is published whole, by a rename; until then its name ends with `.partial`. A call with the same
    arguments continues an interrupted one.

    Args:
        out: A folder that does not exist yet.
        edges: An input of `EdgeSource`; with types, one per relation (source type, name, target type).
        num_parts: Number of parts P.
        num_nodes: N, by type with types; by default one more than the largest id.
        method: `hash` (of the id), `range` (of ids), `metis` or `streaming`; or the part of each node, integers `[N]`
            (by type). `metis` cuts the fewest edges, by pymetis, with the edges in memory. `streaming` cuts few edges,
            in passes over the edges, with 32 bytes a node and up to 1 GiB (after 2PS, Mayer et al., ICDE 2022).
        direction: `in` or `out`: edges of its nodes that a part holds; samplers of PyG's loaders need `in`.
        node_rows: Rows of nodes by attribute name: tensors, arrays or `.npy` files `[N, ...]`; by type with types.
            Names of attributes that every batch has, such as `n_id`, are refused; so are names in `edge_rows` without
            types.
        edge_rows: Rows of edges by attribute name, by edge id, `[E, ...]`; by relation with types.
        node_time, edge_time: Times, integers `[N]` or `[E]`, by type or relation with types; not both.
        edge_weight: Weights, `[E]`, by relation with types.
        memory: Bytes, or `"1G"`: memory for pieces in work.
        seed: Seed of METIS.
        progress: Show progress bars.

    Returns:
        The manifest of the partition.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> manifest = partition_graph("ring", ring, num_parts=2, method="range", node_rows={"x": torch.eye(4)})
        >>> manifest.part_nodes, manifest.num_cut  # nodes of each part, and edges between parts
        ([[2], [2]], 2)
    """
    num_parts = check_num_parts(num_parts)
    if isinstance(method, str) and method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or the part of each node, got {method!r}")
    if direction not in ("in", "out"):
        raise ArgumentError(f"direction must be 'in' or 'out', got {direction!r}")
    check_flag("progress", progress)
    check_seed(seed)
    piece = parse_size(memory, None, "memory")
    if piece < _LEAST_MEMORY:
        raise ArgumentError(f"memory must be at least {_LEAST_MEMORY}, got {memory!r}")
    folder = Path(out)
    if folder.exists():
        raise ArgumentError(f"out must not exist yet, got {str(folder)!r}")
    inputs = read_inputs(edges, num_nodes, node_rows, edge_rows, node_time, edge_time, edge_weight, method)
    partial = folder.with_name(folder.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _writing(folder, partial):
        partial.mkdir(exist_ok=True)
        journal = Journal(partial, {**inputs.identify(), "num_parts": num_parts, "direction": direction, "seed": seed})
        if journal.begun == "same":
            announce(f"{partial} holds work of an earlier run: going on from there")
        elif journal.begun == "other":
            announce(f"{partial} was begun with other arguments or cannot be gone on with: it is begun anew")
        manifest = Builder(partial, journal, inputs, num_parts, direction, piece, seed, progress).build()
        sync_folder(partial)
        os.rename(partial, folder)
        # After the rename: a crash in between would leave a `.partial` folder without a journal, which no run could
        # continue.
        Journal.remove(folder)
        sync_folder(folder.parent)
    return manifest


@contextlib.contextmanager
def _writing(folder: Path, partial: Path) -> Iterator[None]:
    """Keep other processes from writing the same partition, if the file system supports locks."""
    from filelock import FileLock, Timeout

    path = partial.with_name(partial.name + ".lock")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ArgumentError(f"out must not be written by anybody else meanwhile, got {str(folder)!r}") from error
    except (OSError, NotImplementedError):
        # This file system has no locks.
        pass
    try:
        # Another process may have just written it.
        if folder.exists():
            raise ArgumentError(f"out must not exist yet, got {str(folder)!r}")
        yield
    finally:
        if folder.exists():
            path.unlink(missing_ok=True)
        lock.release()
