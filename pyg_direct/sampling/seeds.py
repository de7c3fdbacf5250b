"""Seeds of a batch by type, checked, as the nodes of hop 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph.hetero import HeteroTopo, PlacedHetero
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.upload import upload

_IDENTITY_BITS = 62


class Seeds(NamedTuple):
    """Seeds, type after type.

    Attributes:
        rows: Ids within their types, int64 `[B]`.
        trees: Number of each seed in the order given, int64 `[B]`; empty unless disjoint.
        identities: int64 `[B]`, see `kernels/worklist.py`.
        times: Time of each tree, int64; empty on a graph without times.
        counts: Seeds of each type, int64 `[T]`.
        bases: Where each type begins among the identities, and the end of the last, int64 `[T + 1]`.
        tree_shift: Place of the tree among the bits of an identity.
        tree_bits: Bits of a tree; 0 unless disjoint.
    """

    rows: Tensor
    trees: Tensor
    identities: Tensor
    times: Tensor
    counts: np.ndarray
    bases: np.ndarray
    tree_shift: int
    tree_bits: int


def read_seeds(topology: PlacedHetero, seeds: Tensor | Mapping[str, Tensor],
               seed_time: Tensor | Mapping[str, Tensor] | None, disjoint: bool) -> Seeds:  # fmt: skip
    """Check seeds and bring them to the device that samples.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    topo, device = topology.topo, topology.device
    given = {kind: _check_seeds(topo, kind, ids) for kind, ids in _by_type(topo, "seeds", seeds).items()}
    counts = np.array([given[kind].numel() if kind in given else 0 for kind in topo.node_types], dtype=np.int64)
    total = int(counts.sum())
    bases, tree_shift, tree_bits = topo.type_starts, _IDENTITY_BITS, 0
    if disjoint:
        tree_shift, tree_bits = max(topo.num_nodes.values(), default=0).bit_length(), max((total - 1).bit_length(), 1)
        if tree_shift + tree_bits + len(bases).bit_length() > _IDENTITY_BITS:
            raise ArgumentError(f"seeds must be fewer for disjoint trees over so many nodes, got {total}")
        bases = np.arange(len(bases), dtype=np.int64) << (tree_shift + tree_bits)
    times = _read_times(topology, given, seed_time) if topo.is_temporal else None
    first_tree = dict(zip(given, np.cumsum([0, *(ids.numel() for ids in given.values())]).tolist(), strict=False))
    own = [(given[kind].long(), kind, base) for kind, base in zip(topo.node_types, bases.tolist(), strict=False)
           if kind in given]  # fmt: skip
    # Where all seeds are on the host they travel together.
    is_host = all(ids.device.type == "cpu" for ids, *_ in own)
    place = torch.device("cpu") if is_host else device
    none = torch.empty(0, dtype=torch.int64, device=place)
    rows = torch.cat([ids.to(place) for ids, *_ in own]) if own else none
    identities = torch.cat([ids.to(place) + base for ids, _, base in own]) if own else none
    trees = none
    if disjoint and own:
        firsts = [(first_tree[kind], ids.numel()) for ids, kind, _ in own]
        trees = torch.cat([torch.arange(first, first + count, device=place) for first, count in firsts])
        identities += trees << tree_shift
    if place != device:
        rows, identities, trees = upload(torch.cat([rows, identities, trees]), device).split(
            [rows.numel(), identities.numel(), trees.numel()])  # fmt: skip
    if times is None:
        times = rows[:0]
    return Seeds(rows, trees, identities, times, counts, bases, tree_shift, tree_bits)


def _by_type(topo: HeteroTopo, name: str, values: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(values, Tensor):
        if len(topo.node_types) != 1:
            raise ArgumentTypeError(f"{name} must map node types to tensors, for a graph with {topo.node_types}")
        return {topo.node_types[0]: values}
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"{name} must be a tensor or map node types to tensors, got {type(values).__name__}")
    for kind in values:
        if kind not in topo.num_nodes:
            raise ArgumentError(f"{name} must name known node types, got {kind!r} of {topo.node_types}")
    return dict(values)


def _check_seeds(topo: HeteroTopo, kind: str, ids: Tensor) -> Tensor:
    size, name = topo.num_nodes[kind], "seeds" if topo.is_homogeneous else f"seeds[{kind!r}]"
    ids = check_ids(name, ids, size)
    if ids.is_cuda and ids.numel() > 0:
        low, high = (int(v) for v in torch.stack(torch.aminmax(ids)).tolist())
        if low < 0 or high >= size:
            raise IdError(f"{name} must lie in [0, {size}), got {low if low < 0 else high}")
    return ids


def _read_times(topology: PlacedHetero, given: dict[str, Tensor],
                seed_time: Tensor | Mapping[str, Tensor] | None) -> Tensor:  # fmt: skip
    """Time of each seed, in the order given."""
    topo, device = topology.topo, topology.device
    if seed_time is not None:
        by_type = _by_type(topo, "seed_time", seed_time)
        if set(by_type) != set(given):
            raise ArgumentError(f"seed_time must have the types of seeds {sorted(given)}, got {sorted(by_type)}")
        times = []
        for kind, ids in given.items():
            time = by_type[kind]
            if time.is_floating_point() or time.is_complex() or time.dtype == torch.bool:
                raise ArgumentTypeError(f"seed_time must hold integers, got {time.dtype}")
            if time.shape != ids.shape:
                raise ArgumentError(f"seed_time must have shape {tuple(ids.shape)}, got {tuple(time.shape)}")
            times.append(upload(time, device).long())
        return torch.cat(times) if times else torch.empty(0, dtype=torch.int64, device=device)
    if not topo.timed_types:
        raise ArgumentError(
            "seed_time (a loader's input_time) must be given for a graph whose edges have times, got None"
        )
    starts = dict(zip(topo.node_types, topo.type_starts.tolist(), strict=False))
    times = []
    for kind, ids in given.items():
        if kind not in topo.timed_types:
            raise ArgumentError("seed_time (a loader's input_time) must be given for seeds without times of their "
                                f"own, got None for {kind!r}")  # fmt: skip
        times.append(topology.rows.node_time[upload(ids, device).long() + starts[kind]])
    return torch.cat(times) if times else torch.empty(0, dtype=torch.int64, device=device)
