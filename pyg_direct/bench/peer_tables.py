"""Feature tables of other projects, each read through its own public API; ids and rows are on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import Tensor

from pyg_direct.bench.peers import PEERS, whole_graph_tensor

# Ids, int64 `[B]` on the GPU, to their rows there.
Reader = Callable[[Tensor], Tensor]


def open_tables(table: Tensor, placement: str) -> Iterator[tuple[str, Reader]]:
    """Tables of torch and of the installed peers that hold `table`, float32 `[N, F]`, on the GPU or on the host."""
    name, reader = _open_torch(table, placement)
    yield name, reader
    for peer in PEERS:
        if peer.title in _OPENERS and peer.is_installed:
            yield peer.name, _OPENERS[peer.title](table, placement)


def _open_torch(table: Tensor, placement: str) -> tuple[str, Reader]:
    if placement == "cuda":
        on_gpu = table.cuda()
        return "torch.index_select", lambda ids: torch.index_select(on_gpu, 0, ids)
    return "torch.index_select on the CPU, then a copy", lambda ids: torch.index_select(table, 0, ids.cpu()).cuda()


def _open_glt(table: Tensor, placement: str) -> Reader:
    feature = import_module("graphlearn_torch").data.Feature(
        table.clone(), split_ratio=float(placement == "cuda"), device=0
    )
    return lambda ids: feature[ids]


def _open_quiver(table: Tensor, placement: str) -> Reader:
    cache = table.numel() * table.element_size() if placement == "cuda" else 0
    feature = import_module("quiver").Feature(0, [0], device_cache_size=cache)
    feature.from_cpu_tensor(table.clone())
    return lambda ids: feature[ids]


def _open_whole_graph(table: Tensor, placement: str) -> Reader:
    tensor = whole_graph_tensor(table, placement)
    return lambda ids: tensor.gather(ids)


_OPENERS: dict[str, Callable[[Tensor, str], Reader]] = {
    "GLT": _open_glt,
    "Quiver": _open_quiver,
    "WholeGraph": _open_whole_graph,
}
