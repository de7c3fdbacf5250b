"""Choice of the rows of other parts to copy: the rows that sampling from this part needs most often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.data import BaseData

from pyg_direct.cache_folder import hold
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning.files import read_array, write_array
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.errors import ArgumentError, ArgumentTypeError, PartitionError
from pyg_direct.object_text import one_line, show_sizes
from pyg_direct.ops.argument_checks import tell_kind


def rank_remote(part: GraphPart, kind: str, counts: Tensor) -> Tensor:
    """Rank nodes of other parts by their counts, int64; nodes with count 0 are left out, ties go to the lowest id.

    Args:
        counts: How often each node was needed, `[N]`.
    """
    met = counts.nonzero().view(-1)
    met = met[part.owners(kind, met) != part.part]
    return met[counts[met].argsort(descending=True, stable=True)]


def count_listed(part: GraphPart, kind: str) -> Tensor:
    """Count how often the part's own neighbor lists contain each node of a type, int64 `[N]` on the CPU."""
    placed = part.place()
    number = placed.topo.node_types.index(kind)
    low, size = int(placed.topo.type_starts[number]), placed.topo.num_nodes[kind]
    counts = torch.zeros(size, dtype=torch.int64, device="cpu")
    for relation in np.flatnonzero(placed.topo.reached == number):
        begin, end = (int(at) for at in placed.topo.edge_starts[relation : relation + 2])
        counts += torch.bincount(placed.rows.indices[begin:end].cpu().long() - low, minlength=size)
    return counts


def choose_replicas(part: GraphPart, num_bytes: int) -> dict[str, Tensor]:
    """Choose ids by node type whose rows take at most `num_bytes`, the most frequent in the part's neighbor lists."""
    ranked, scores, sizes = {}, [], []
    for kind in part.books:
        row_bytes = sum(rows[:1].numel() * rows.element_size() if len(rows) else 0
                        for rows in part.tables[kind].rows.values())  # fmt: skip
        counts = count_listed(part, kind)
        ranked[kind] = rank_remote(part, kind, counts)[: num_bytes // row_bytes if row_bytes else 0]
        scores.append(counts[ranked[kind]].double() / max(1, row_bytes))
        sizes.append(torch.full((len(ranked[kind]),), row_bytes, device="cpu"))
    # Over all types together, the rows that save most reads per byte of memory.
    order = torch.cat(scores).argsort(descending=True, stable=True)
    fits = torch.cat(sizes)[order].cumsum(0) <= num_bytes
    is_kept = torch.zeros(len(order), dtype=torch.bool, device="cpu")
    is_kept[order[fits]] = True
    flags = is_kept.split([len(ids) for ids in ranked.values()])
    return {kind: ids[flag] for (kind, ids), flag in zip(ranked.items(), flags, strict=True)}


def plan_replicas(folder: str | PathLike[str], counts: Mapping[int, Mapping[str, Tensor]], share: float) -> None:
    """Write the rows of other parts that each part keeps, from counted access; `DistGraph(replicas="plan")` reads it.

    After the frequency partitioner of GraphLearn-for-PyTorch. A short run before training counts how often batches from
    the seeds of a part contain each node (`AccessCounter`).

    Args:
        folder: The partition.
        counts: For each part, by node type (`"nodes"` without types), how often its batches contained each node,
            integers `[N]`. Parts keep no rows of types that are left out.
        share: Limit of copied rows, as a share of the nodes of the part.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.

    Example:
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> manifest = partition_graph("planned", ring, num_parts=2, method="range")
        >>> plan_replicas("planned", {0: {"nodes": torch.tensor([0, 0, 1, 5])}}, share=0.5)
        >>> read_replicas("planned", manifest, 0)["nodes"].tolist()  # part 0 keeps one row of part 1
        [3]
    """
    manifest = Manifest.read(folder)
    if not (isinstance(share, (int, float)) and 0 <= share <= manifest.num_parts):
        raise ArgumentError(f"share must lie in [0, {manifest.num_parts}], got {share!r}")
    if not isinstance(counts, Mapping) or not all(isinstance(by_kind, Mapping) for by_kind in counts.values()):
        raise ArgumentTypeError(f"counts must map parts to counts by node type, got {tell_kind(counts)}")
    sizes = {entry.name: entry.num_nodes for entry in manifest.nodes}
    for part, by_kind in counts.items():
        manifest.check_part(part)
        for kind, met in by_kind.items():
            if kind not in sizes:
                raise ArgumentError(f"counts must name known node types, got {kind!r} of {list(sizes)}")
            if met.shape != (sizes[kind],):
                raise ArgumentError(f"counts must have shape ({sizes[kind]},) for {kind!r}, got {tuple(met.shape)}")
    # Processes may write the plans of their parts at the same time.
    with hold(Path(folder) / "replicas"):
        _write_plans(folder, counts, share)


def _write_plans(folder: str | PathLike[str], counts: Mapping[int, Mapping[str, Tensor]], share: float) -> None:
    manifest = Manifest.read(folder)
    for part, by_kind in counts.items():
        # Forgotten first: after an interrupt, changed files that the manifest does not list are no damage.
        manifest.forget(Path(folder), f"replicas-{part:05d}/")
        target = Path(folder) / f"replicas-{part:05d}"
        target.mkdir(exist_ok=True)
        for number, entry in enumerate(manifest.nodes):
            met = by_kind.get(entry.name)
            if met is None:
                # Remove the file of an earlier plan.
                (target / f"node-{number}.npy").unlink(missing_ok=True)
                continue
            met = met.cpu()
            ids = met.nonzero().view(-1)
            ids = ids[manifest.read_book(folder, number).owners(ids) != part]
            ids = ids[met[ids].argsort(descending=True, stable=True)]
            most = int(share * manifest.part_nodes[part][number])
            write_array(target / f"node-{number}.npy", ids[:most].numpy())
    manifest.write(Path(folder), prefix="replicas-")


def read_replicas(folder: str | PathLike[str], manifest: Manifest, part: int) -> dict[str, Tensor]:
    """Read the ids that `plan_replicas` wrote for a part, by node type."""
    target, found = Path(folder) / f"replicas-{part:05d}", {}
    if not target.is_dir():
        raise PartitionError(f"{target} is missing; plan_replicas writes it")
    for number, entry in enumerate(manifest.nodes):
        if (target / f"node-{number}.npy").exists():
            found[entry.name] = torch.from_numpy(read_array(target / f"node-{number}.npy"))
    return found


class AccessCounter:
    """Counter of the nodes in batches, for `plan_replicas`.

    Args:
        num_nodes: N, by type with types.

    Example:
        >>> counter = AccessCounter(4)
        >>> for ids in ([0, 2], [2, 3]):
        ...     counter.add(Data(n_id=torch.tensor(ids)))
        >>> counter.counts["nodes"].tolist()
        [1, 0, 2, 1]
    """

    def __init__(self, num_nodes: int | Mapping[str, int]) -> None:
        sizes = num_nodes if isinstance(num_nodes, Mapping) else {"nodes": num_nodes}
        self.counts = {kind: torch.zeros(size, dtype=torch.int64, device="cpu") for kind, size in sizes.items()}

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_sizes({kind: counts.numel() for kind, counts in self.counts.items()})

    def add(self, batch: object) -> None:
        """Count the nodes of a batch.

        Args:
            batch: A `Data` or `HeteroData` with `n_id`.

        Raises:
            ArgumentTypeError: `batch` is no batch of a loader.
        """
        if not isinstance(batch, BaseData):
            raise ArgumentTypeError(f"batch must be a Data or a HeteroData with n_id, got {type(batch).__name__}")
        for kind, counts in self.counts.items():
            part = batch if kind == "nodes" and hasattr(batch, "n_id") else batch[kind]  # type: ignore[index]
            ids = part.n_id.cpu()
            counts.scatter_add_(0, ids, torch.ones_like(ids))
