"""Options that loaders and functions take as `**kwargs`, by name, so that type checkers find misspelt ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

import torch
from torch import Tensor

from pyg_direct.typing import Device


class WorkerOptions(TypedDict, total=False):
    """Options of `torch.utils.data.DataLoader` beside `batch_size` and `shuffle`."""

    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[Any]] | None
    num_workers: int
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


class ShuffledOptions(WorkerOptions, total=False):
    """Options of `torch.utils.data.DataLoader` beside `batch_size`."""

    shuffle: bool | None


class TorchOptions(ShuffledOptions, total=False):
    """Options of `torch.utils.data.DataLoader`."""

    batch_size: int | None


class WalkOptions(TorchOptions, total=False):
    """Options of a loader of walks."""

    device: Device
    seed: int | None
    prefetch: int
    ranks: tuple[int, int] | str | None
    uneven: str


class _PlanOptions(TypedDict, total=False):
    """Options of `NeighborLoader` that tell how neighbors are sampled, and where."""

    input_time: Tensor | None
    replace: bool
    disjoint: bool
    temporal_strategy: str
    time_attr: str | None
    weight_attr: str | None
    transform: Callable[[Any], Any] | None
    transform_sampler_output: Callable[[Any], Any] | None
    is_sorted: bool
    filter_per_worker: bool | None
    directed: bool
    device: Device
    topology_placement: str | None
    topology_cache: int | str | None
    sampling: str
    layer_dependency: bool
    super_batch: int | None
    seed: int | None
    prefetch: int
    time_comparison: str
    time_window: int | None
    ranks: tuple[int, int] | str | None
    uneven: str
    custom_cls: Any
    input_id: Tensor | None
    input_start_time: Tensor | None
    input_end_time: Tensor | None


class InferOptions(WorkerOptions, _PlanOptions, total=False):
    """Options of `NeighborLoader` that layer-wise inference takes."""

    subgraph_type: Any
    neighbor_sampler: Any


class InferenceLoaderOptions(InferOptions, total=False):
    """Options of `NeighborLoader` that `inference_loader` takes."""

    placement: str


class SubGraphOptions(TorchOptions, _PlanOptions, total=False):
    """Options of `NeighborLoader` that `SubGraphLoader` takes."""

    placement: str
    feature_cache: int | str | None
    store_dtype: torch.dtype | None
    cache_policy: str | None
    cold_policy: str
    hotness: str
    presample: float | None
    ahead: int | str | None


class DistSubGraphOptions(TorchOptions, total=False):
    """Options of `DistNeighborLoader` that `DistSubGraphLoader` takes."""

    input_time: Tensor | None
    replace: bool
    disjoint: bool
    temporal_strategy: str
    time_attr: str | None
    weight_attr: str | None
    transform: Callable[[Any], Any] | None
    transform_sampler_output: Callable[[Any], Any] | None
    filter_per_worker: bool | None
    seed: int | None
    prefetch: int
    ranks: str
    uneven: str
    time_comparison: str
    time_window: int | None
    input_start_time: Tensor | None
    input_end_time: Tensor | None
    ahead: int
    input_id: Tensor | None
