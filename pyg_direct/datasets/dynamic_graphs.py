"""Dynamic graphs in plain files: JSON sets of PyTorch Geometric Temporal, snapshots of edges, papers by year.

Generated dynamic graphs have edges of skewed degrees, a share of which is replaced from each snapshot to the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.datasets.dataset import check_fraction, check_int
from pyg_direct.datasets.folder import open_archive, read_arrays
from pyg_direct.errors import ArgumentError


class DynamicShape(NamedTuple):
    """Size of a generated dynamic graph: nodes, edges of a snapshot, snapshots, share of edges replaced a step."""

    num_nodes: int
    num_edges: int
    num_snapshots: int = 16
    change: float = 0.1


# Sizes of the graphs that dynamic GNNs are usually measured on; only the sizes are taken from them.
PRESETS = {
    "epinions-like": DynamicShape(876_252, 13_668_320),
    "youtube-like": DynamicShape(3_223_589, 9_375_374),
    "flickr-like": DynamicShape(2_302_925, 33_140_017),
}


def draw_snapshots(shape: DynamicShape, seed: int = 0, device: str | torch.device = "cpu",
                   skew: float = 2.0) -> list[Tensor]:  # fmt: skip
    """Return `edge_index` int64 `[2, E]` of each snapshot.

    Args:
        shape: How many nodes, edges and snapshots, and how much changes.
        seed: Equal seeds give equal graphs on one kind of device.
        device: The device that draws them and holds them.
        skew: Sources and targets are drawn as N * u**skew of uniform u, so that few nodes have many edges.

    Raises:
        ArgumentError: a size below 1, or a share outside [0, 1].
        ArgumentTypeError: one that is no number.
    """
    for name in ("num_nodes", "num_edges", "num_snapshots"):
        check_int(f"shape.{name}", getattr(shape, name), least=1)
    check_fraction("shape.change", shape.change)
    generator = torch.Generator(device).manual_seed(seed)
    place = torch.randperm(shape.num_nodes, generator=generator, device=device)

    def draw(count: int) -> Tensor:
        uniform = torch.rand(2, count, generator=generator, device=device, dtype=torch.float64)
        slots = (uniform**skew * shape.num_nodes).long().clamp_(max=shape.num_nodes - 1)
        return place[slots]

    edges = draw(shape.num_edges)
    snapshots = [edges]
    replaced = int(shape.change * shape.num_edges)
    for _ in range(shape.num_snapshots - 1):
        edges = edges.clone()
        chosen = torch.randperm(shape.num_edges, generator=generator, device=device)[:replaced]
        edges[:, chosen] = draw(replaced)
        snapshots.append(edges)
    return snapshots


def synthetic_dtdg(num_nodes: int = 1000, num_edges: int = 10_000, num_snapshots: int = 16, change: float = 0.1,
                   num_features: int = 4, seed: int = 0, weighted: bool = False) -> list[Data]:  # fmt: skip
    """Generate a dynamic graph with something to learn: the target of a node is the mean of its neighbors' signal.

    Args:
        num_features: F, at least 1: the last feature is the signal.

    Returns:
        For each snapshot `x` fp32 `[N, F]`, `edge_index` `[2, E]`, `edge_attr` fp32 `[E]` if `weighted`, and
        `y` fp32 `[N]`, on the CPU.
    """
    check_int("num_features", num_features, least=1)
    edges = draw_snapshots(DynamicShape(num_nodes, num_edges, num_snapshots, change), seed)
    # Whatever torch's default device is.
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    phase = torch.rand(num_nodes, generator=generator, device="cpu")
    out = []
    for t, edge_index in enumerate(edges):
        lags = torch.arange(num_features, device="cpu") / (2.0 * num_features)
        noise = torch.randn(num_nodes, num_features, generator=generator, device="cpu")
        x = torch.sin(6.28 * (phase.unsqueeze(1) + t / 8 + lags)) + 0.1 * noise
        degree = phase.new_zeros(num_nodes).index_add_(0, edge_index[1], phase.new_ones(num_edges))
        y = phase.new_zeros(num_nodes).index_add_(0, edge_index[1], x[edge_index[0], -1]) / degree.clamp(min=1)
        weight = torch.rand(num_edges, generator=generator, device="cpu") + 0.5 if weighted else None
        out.append(Data(x=x, edge_index=edge_index, edge_attr=weight, y=y))
    return out


# Errors raised for a file of a known format in which a part is missing or has another type.
_STRANGE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def load_temporal(path: str | Path, lags: int = 8) -> list[Data]:
    """Load the snapshots of a file, with features and targets of nodes.

    Args:
        path: `england_covid.json`, `twitter_tennis_*.json` or `chickenpox.json` of PyTorch Geometric Temporal; or a
            `snapshots.npz` of undirected edges stored once: `ptr` `[T + 1]`, `src`, `dst`, `num_nodes`; or an `.npz` of
            papers (ogbn-arxiv): `edge_index` `[2, E]`, a paper and one that it cites, and `node_year` `[N]`.
        lags: Past values that become features, if the file holds one value a node and step; at least 1, and fewer than
            the steps.

    Returns:
        `x` fp32 `[N, F]`, `edge_index`, `edge_attr` (None without weights) and `y` fp32 `[N]` for each snapshot, on the
        CPU. If the file holds only edges, features are the degrees in this snapshot and targets the degrees in the next
        one. Papers make a snapshot a year, of all citations up to it, both ways: see `read_years`.

    Raises:
        ArgumentTypeError: `lags` is no integer.
    """
    path, lags = Path(path), check_int("lags", lags, least=1)
    if not path.is_file():
        raise ArgumentError(f"path must name a file, got {path}")
    try:
        snapshots = _read_archive(path) if path.suffix == ".npz" else _read_text(path, lags)
        for snapshot in snapshots:
            _check_ids(snapshot)
    except ArgumentError:
        raise
    except _STRANGE as error:
        what = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"path must hold whole snapshots in a known form, got {path}, which gives {what}"
                            ) from error  # fmt: skip
    if not snapshots:
        raise ArgumentError(f"path must hold two snapshots at least, the last for its targets, got {path}")
    return snapshots


def _check_ids(snapshot: Data) -> None:
    ends = snapshot.edge_index
    if ends.numel() and not 0 <= int(ends.min()) <= int(ends.max()) < len(snapshot.y):
        raise ValueError(f"edges between nodes {int(ends.min())} to {int(ends.max())} of {len(snapshot.y)}")


def _make(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor on the CPU, whatever torch's default device is."""
    return torch.as_tensor(values, dtype=dtype, device="cpu")


def _read_text(path: Path, lags: int) -> list[Data]:
    data = json.loads(path.read_text())
    if "edge_mapping" in data:
        return _read_mapping(data, lags)
    if "FX" in data:
        values = np.array(data["FX"], dtype=np.float32)
        return _lag(values, lags, [np.array(data["edges"]).T] * len(values), [None] * len(values))
    if "time_periods" in data and "0" in data:
        return _read_numbered(data)
    raise ArgumentError(f"path must hold snapshots in a known form, got {path} with {sorted(data)[:5]}")


def _read_archive(path: Path) -> list[Data]:
    with open_archive(path) as file:
        of_papers = "node_year" in file
    if of_papers:
        edge_index, node_year = read_arrays(path, ("edge_index", "node_year"))
        return read_years(edge_index, node_year)
    return _read_edges(*read_arrays(path, ("ptr", "src", "dst", "num_nodes")))


def _lag(values: np.ndarray, lags: int, edges: list[Any], weights: list[Any]) -> list[Data]:
    """Return standardized values `[T, N]`, `lags` of them as features and the next one as the target."""
    if lags >= len(values):
        raise ArgumentError(f"lags must be fewer than the steps of the file, got {lags} of {len(values)} steps")
    values = (values - values.mean(0)) / (values.std(0) + 1e-10)
    out = []
    for t in range(len(values) - lags):
        weight = None if weights[t] is None else _make(weights[t])
        edge_index = _make(np.ascontiguousarray(edges[t]), torch.int64)
        out.append(Data(x=_make(values[t : t + lags].T), edge_attr=weight, edge_index=edge_index,
                        y=_make(values[t + lags])))  # fmt: skip
    return out


def _read_mapping(data: dict[str, Any], lags: int) -> list[Data]:
    mapping, times = data["edge_mapping"], range(data["time_periods"])
    edges = [np.array(mapping["edge_index"][str(t)]).T for t in times]
    weights = [np.array(mapping["edge_weight"][str(t)]) for t in times]
    return _lag(np.array(data["y"], dtype=np.float64), lags, edges, weights)


def _read_numbered(data: dict[str, Any]) -> list[Data]:
    out = []
    for t in range(data["time_periods"]):
        part = data[str(t)]
        out.append(Data(x=_make(part["X"]), y=_make(part["y"]), edge_attr=_make(part["weights"]),
                        edge_index=_make(part["edges"], torch.int64).T.contiguous()))  # fmt: skip
    return out


def _read_edges(ptr: np.ndarray, src: np.ndarray, dst: np.ndarray, count: np.ndarray) -> list[Data]:
    num_nodes = int(count)
    if not (ptr[0] == 0 and ptr[-1] == len(src) and (np.diff(ptr) >= 0).all()):
        raise ValueError(f"ptr that does not ascend from 0 to {len(src)} edges")
    ends = torch.from_numpy(np.stack([src, dst]).astype(np.int64))
    edges = [ends[:, begin:end] for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
    edges = [torch.cat([part, part.flip(0)], 1) for part in edges]
    degrees = [torch.bincount(part[1], minlength=num_nodes).float().log1p() for part in edges]
    return [
        Data(x=torch.stack([degrees[t], torch.ones(num_nodes, device="cpu")], 1), edge_index=edges[t], y=degrees[t + 1])
        for t in range(len(edges) - 1)
    ]


def read_years(edge_index: np.ndarray, node_year: np.ndarray, num_years: int = 16) -> list[Data]:
    """Make snapshots of the last years of a graph of papers; the very last year serves only as targets.

    Args:
        edge_index: A paper and one that it cites, `[2, E]`; a citation is of the year of the later of both.
        node_year: `[N]`.
        num_years: T, snapshots at most.

    Returns:
        For each year `edge_index`, both ways, `x` fp32 `[N, 4]` and `y` fp32 `[N]`. The columns of `x` are 1 if the
        paper has appeared, then logarithms of 1 + count: its references, its citations so far, and its citations of
        this year. `y` is the logarithm for the citations of the next year.
    """
    edges = torch.from_numpy(np.ascontiguousarray(edge_index, dtype=np.int64))
    year = torch.from_numpy(np.asarray(node_year, dtype=np.int64))
    num_nodes, known = year.numel(), torch.unique(year)
    since = torch.maximum(year[edges[0]], year[edges[1]])

    def count(ends: Tensor) -> Tensor:
        return torch.bincount(ends, minlength=num_nodes).float().log1p()

    out = []
    for t in known[-num_years - 1 : -1].tolist():
        seen = edges[:, since <= t]
        x = torch.stack([(year <= t).float(), count(seen[0]), count(seen[1]), count(edges[1, since == t])], 1)
        following = int(known[known > t][0])
        out.append(Data(x=x, edge_index=torch.cat([seen, seen.flip(0)], 1), y=count(edges[1, since == following])))
    return out
