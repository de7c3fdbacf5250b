"""Arguments of `Feature`, checked before any row is read or freed."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.hot_rows import check_hotness
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.ops.argument_checks import as_ids, check_count, check_ids


def check_options(rank: Any, csr_topo: Any, placement: Any, store_dtype: Any, hotness: Any, link_blocks: Any) -> None:
    """Refuse values of arguments that `Feature` does not know."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ArgumentTypeError(f"rank must be the index of a GPU, got {rank!r}")
    if csr_topo is not None and not hasattr(csr_topo, "node_count"):
        raise ArgumentTypeError(f"csr_topo must be a CSRTopo, got {type(csr_topo).__name__}")
    if placement not in ("unified", "pinned"):
        raise ArgumentError(f"placement must be 'unified' or 'pinned', got {placement!r}")
    check_store_dtype(store_dtype)
    check_hotness(hotness)
    if link_blocks is not None and (isinstance(link_blocks, bool) or not isinstance(link_blocks, int)):
        raise ArgumentTypeError(f"link_blocks must be an int or None, got {link_blocks!r}")
    if link_blocks is not None and link_blocks < 1:
        raise ArgumentError(f"link_blocks must be at least 1, got {link_blocks}")


def check_dense(cpu_tensor: Any) -> None:
    """Refuse rows that are no dense tensor of at least one dimension."""
    if not isinstance(cpu_tensor, Tensor) or cpu_tensor.layout != torch.strided or cpu_tensor.is_meta:
        kind = getattr(cpu_tensor, "layout", type(cpu_tensor).__name__)
        raise ArgumentTypeError(
            f"cpu_tensor must be a dense tensor, got {'one on device meta' if kind is torch.strided else kind}"
        )
    if cpu_tensor.dim() == 0:
        raise ArgumentError("cpu_tensor must have at least one dimension, got a scalar")


def check_num_rows(csr_topo: Any, num_rows: int) -> None:
    """Refuse rows that are fewer than the nodes of a graph."""
    if csr_topo is not None and num_rows < csr_topo.node_count:
        raise ArgumentError(f"cpu_tensor must have a row for each of the {csr_topo.node_count} nodes of "
                            f"csr_topo, got {num_rows}")  # fmt: skip


def check_update(feature: Any, ids: Tensor | Sequence[int], rows: Any) -> Tensor:
    """Return the ids of `Feature.update_`, checked with the rows that replace theirs."""
    shape, dtype = feature.shape, feature.dtype
    if isinstance(feature.stored, SpilledRows):
        raise ArgumentError(f"rows of {feature.placement!r} cannot be updated: {feature.stored.tier.refusal}")
    if feature._handle is not None:
        raise ArgumentError("rows that several processes share cannot be updated: they are read-only")
    if not isinstance(rows, Tensor):
        raise ArgumentTypeError(f"rows must be a tensor, got {type(rows).__name__}")
    ids = check_ids("ids", as_ids("ids", ids), shape[0])
    if rows.shape != (ids.numel(), *shape[1:]) or rows.dtype != dtype:
        raise ArgumentError(f"rows must be {(ids.numel(), *shape[1:])} of {dtype}, got {tuple(rows.shape)} "
                            f"of {rows.dtype}")  # fmt: skip
    return ids


def check_following(period: Any, fade: float) -> None:
    """Refuse arguments of `Feature.follow_reads`."""
    check_count("period", period, 0)
    if not 0 <= fade <= 1:
        raise ArgumentError(f"fade must lie in [0, 1], got {fade!r}")


def find_places(local_order: Tensor, num_rows: int, places: Tensor | None) -> Tensor:
    """Return the row of each id, counted from 1, int64 `[N]`, if the id `local_order[i]` means row `i`.

    Args:
        local_order: int32 or int64 `[N]`, each of 0 to N - 1 once.
        places: Row of each `i`, counted from 1, if rows lie in another order.
    """
    order = check_ids("local_order", local_order, num_rows).cpu().long()
    seen = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
    seen[order] = True
    if len(order) != num_rows or not bool(seen.all()):
        raise ArgumentError(f"local_order must hold each of 0 to {num_rows - 1} once, got {len(order)} ids, "
                            f"{int(seen.sum())} of them different")  # fmt: skip
    place = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    place[order] = torch.arange(1, num_rows + 1, device="cpu") if places is None else places
    return place


def read_disk_map(path: str | PathLike[str], disk_map: Tensor, held: torch.Size, dtype: torch.dtype
                  ) -> tuple[RowFile, Tensor]:  # fmt: skip
    """Return the file of `Feature.set_mmap_file`, and the place of each of its ids among the rows held, int64 `[N]`."""
    file = RowFile(path)
    if file.order is not None:
        raise ArgumentError(f"path must name a table in the order of ids, got {path}, which pack_rows wrote: call "
                            "from_file")  # fmt: skip
    places = check_ids("disk_map", disk_map).cpu().long()
    if len(places) != len(file.rows):
        raise ArgumentError(f"disk_map must have a place for each of the {len(file.rows)} rows of {path}, got "
                            f"{len(places)}")  # fmt: skip
    if len(places) and int(places.max()) >= held[0]:
        raise IdError(f"disk_map must hold places below {held[0]}, got {int(places.max())}")
    if file.rows.shape[1:] != held[1:] or file.rows.dtype != dtype:
        raise ArgumentError(f"path must hold rows {tuple(held[1:])} of {dtype}, {path} holds "
                            f"{tuple(file.rows.shape[1:])} of {file.rows.dtype}")  # fmt: skip
    return file, places
