"""Dynamic graphs in plain files: JSON sets of PyTorch Geometric Temporal, and snapshots of edges in `snapshots.npz`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError


def load_temporal(path: str | Path, lags: int = 8) -> list[Data]:
    """Snapshots of a file, with features and targets of nodes.

    Args:
        path: `england_covid.json`, `twitter_tennis_*.json` or `chickenpox.json` as PyTorch Geometric Temporal has them,
            or a `snapshots.npz` of undirected edges stored once: `ptr` `[T + 1]`, `src`, `dst`, `num_nodes`.
        lags: Past values that are features, where the file holds one value a node and step.

    Returns:
        `x` fp32 `[N, F]`, `edge_index`, `edge_attr` (None without weights) and `y` fp32 `[N]` for each snapshot. Of
        edges alone, features and the target are degrees, those of this snapshot and of the next.

    Raises:
        ArgumentError: there is no such file, or it holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(f"path must name a file, got {path}")
    if path.suffix == ".npz":
        return _read_edges(path)
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


def _read_edges(path: Path) -> list[Data]:
    with np.load(path) as file:
        ptr, num_nodes = file["ptr"], int(file["num_nodes"])
        ends = torch.from_numpy(np.stack([file["src"], file["dst"]]).astype(np.int64))
    edges = [ends[:, begin:end] for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
    edges = [torch.cat([part, part.flip(0)], 1) for part in edges]
    degrees = [torch.bincount(part[1], minlength=num_nodes).float().log1p() for part in edges]
    return [
        Data(x=torch.stack([degrees[t], torch.ones(num_nodes)], 1), edge_index=edges[t], y=degrees[t + 1])
        for t in range(len(edges) - 1)
    ]
