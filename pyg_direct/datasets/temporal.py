"""Dynamic graphs in plain files: JSON sets of PyTorch Geometric Temporal, snapshots of edges, papers by year."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError


def load_temporal(path: str | Path, lags: int = 8) -> list[Data]:
    """Snapshots of a file, with features and targets of nodes.

    Args:
        path: `england_covid.json`, `twitter_tennis_*.json` or `chickenpox.json` as PyTorch Geometric Temporal has them,
            or a `snapshots.npz` of undirected edges stored once: `ptr` `[T + 1]`, `src`, `dst`, `num_nodes`; or an
            `.npz` of papers (ogbn-arxiv): `edge_index` `[2, E]`, a paper and one that it cites, and `node_year` `[N]`.
        lags: Past values that are features, where the file holds one value a node and step.

    Returns:
        `x` fp32 `[N, F]`, `edge_index`, `edge_attr` (None without weights) and `y` fp32 `[N]` for each snapshot. Of
        edges alone, features and the target are degrees, those of this snapshot and of the next. Papers make a
        snapshot a year, of all citations up to it, both ways: see `read_years`.

    Raises:
        ArgumentError: there is no such file, or it holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"path must name a file, got {path}")
    if path.suffix == ".npz":
        with np.load(path) as file:
            if "node_year" in file:
                return read_years(file["edge_index"], file["node_year"])
            return _read_edges(file)
    data = json.loads(path.read_text())
    if "edge_mapping" in data:
        return _read_mapping(data, lags)
    if "FX" in data:
        values = np.array(data["FX"], dtype=np.float32)
        return _lag(values, lags, [np.array(data["edges"]).T] * len(values), [None] * len(values))
    if "time_periods" in data and "0" in data:
        return _read_numbered(data)
    raise ArgumentError(f"path must hold snapshots in a known form, got {path} with {sorted(data)[:5]}")


def _lag(values: np.ndarray, lags: int, edges: list[Any], weights: list[Any]) -> list[Data]:
    """Standardised values `[T, N]`, `lags` of them the features and the next one the target."""
    values = (values - values.mean(0)) / (values.std(0) + 1e-10)
    out = []
    for t in range(len(values) - lags):
        weight = None if weights[t] is None else torch.as_tensor(weights[t], dtype=torch.float32)
        out.append(Data(x=torch.as_tensor(values[t : t + lags].T, dtype=torch.float32), edge_attr=weight,
                        edge_index=torch.as_tensor(np.ascontiguousarray(edges[t]), dtype=torch.int64),
                        y=torch.as_tensor(values[t + lags], dtype=torch.float32)))  # fmt: skip
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
        out.append(Data(x=torch.tensor(part["X"], dtype=torch.float32), y=torch.tensor(part["y"], dtype=torch.float32),
                        edge_index=torch.tensor(part["edges"], dtype=torch.int64).T.contiguous(),
                        edge_attr=torch.tensor(part["weights"], dtype=torch.float32)))  # fmt: skip
    return out


def _read_edges(file: Any) -> list[Data]:
    ptr, num_nodes = file["ptr"], int(file["num_nodes"])
    ends = torch.from_numpy(np.stack([file["src"], file["dst"]]).astype(np.int64))
    edges = [ends[:, begin:end] for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
    edges = [torch.cat([part, part.flip(0)], 1) for part in edges]
    degrees = [torch.bincount(part[1], minlength=num_nodes).float().log1p() for part in edges]
    return [
        Data(x=torch.stack([degrees[t], torch.ones(num_nodes)], 1), edge_index=edges[t], y=degrees[t + 1])
        for t in range(len(edges) - 1)
    ]


def read_years(edge_index: np.ndarray, node_year: np.ndarray, num_years: int = 16) -> list[Data]:
    """Snapshots of the last years of a graph of papers, except for the very last, which only tells targets.

    Args:
        edge_index: A paper and one that it cites, `[2, E]`; a citation is of the year of the later of both.
        node_year: `[N]`.
        num_years: T, snapshots at most.

    Returns:
        For each year `edge_index`, both ways; `x` fp32 `[N, 4]`: whether the paper has appeared, and the logarithms of
        1 and its references, its citations so far, and those of this year; `y` fp32 `[N]`: that of the next year's.
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
