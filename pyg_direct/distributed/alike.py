"""Whether processes that make batches together were given the same: those of one would else be those of nobody."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import SequentialSampler

from pyg_direct.distributed.graph import DistGraph
from pyg_direct.distributed.part import PartTopo
from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.raw import as_bytes


def check_alike(loader: Any, ranks: str) -> None:
    """Refuse a loader that other processes make otherwise; collective, unless each samples seeds of its own alone.

    Args:
        loader: With its sampler, inputs and numbers; its `graph` in one memory is sampled by each process alone.
        ranks: See `DistNeighborLoader`.

    Raises:
        ArgumentError: others were given something else, in all of them.
    """
    graph, sampler, given = loader.graph, loader._sampler, loader.input_data
    if graph.whole is None:
        negatives = getattr(loader, "neg_sampling", None)
        recipe = sampler._read_recipe()
        fanouts = recipe.table(PartTopo(graph.part.manifest, False, False)).tolist()
        how = (fanouts, replace(recipe, fanouts=()), sampler.time_attr is None, sampler.weight_attr is None,
               negatives and negatives.mode, sampler.strict_negatives, getattr(sampler, "exclude_target_edges", False),
               getattr(sampler, "rev_edge_type", None))  # fmt: skip
        _compare(graph, "num_neighbors and other options of sampling must be equal in all processes", how)
    if ranks == "auto":
        seeds = [getattr(given, name, None) for name in ("node", "row", "col", "time")]
        what = (given.input_type, [_sum_up(ids) for ids in seeds], loader.seed, loader.batch_size, loader.drop_last,
                isinstance(loader.sampler, SequentialSampler))  # fmt: skip
        _compare(graph, "seeds, and seed, batch_size, shuffle and drop_last, must be equal in all processes, which "
                 "share the batches, unless ranks='own'", what)  # fmt: skip


def _sum_up(ids: Tensor | None) -> int | None:
    return None if ids is None else zlib.crc32(as_bytes(ids.cpu().contiguous()).numpy().data)


def _compare(graph: DistGraph, rule: str, value: Any) -> None:
    # Not negative, in 64 bits.
    number = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1
    numbers = graph.communicator.run(graph.communicator.agree, number)
    other = next((rank for rank, found in enumerate(numbers) if found != numbers[0]), None)
    if other is not None:
        raise ArgumentError(f"{rule}, got others on rank {other} than on rank 0")
