"""Arguments of loaders, checked by the constructor: options of torch's DataLoader, seeds, sharing of memory.

`read_input_nodes` reads the seeds.

Options that loaders and functions take as `**kwargs` have names here, so that type checkers find misspelt ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning, warn, warn_unused
from pyg_direct.features.process_sharing import POLICIES, check_cold
from pyg_direct.ops.argument_checks import check_choice, check_count, check_flag, in_short, list_options, refuse_unknown
from pyg_direct.typing import Device

# Only workers need these; None and torch's defaults cause no warning.
_WORKER_OPTIONS = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "pin_memory": False,
                   "pin_memory_device": "", "worker_init_fn": None, "timeout": 0, "multiprocessing_context": None,
                   "in_order": True}  # fmt: skip
# Options without effect on workers of ours: they pass samples on, in order, and end with their epoch.
_NO_WORKERS_OPTIONS = ("persistent_workers", "pin_memory", "pin_memory_device", "in_order")
# PyG's loaders accept and ignore these: the loader has its own.
_DROPPED = ("dataset", "collate_fn")
# Options that may be passed to DataLoader; one is PyG's.
_TORCH_OPTIONS = ("filter_per_worker", *list_options(torch.utils.data.DataLoader))


def settle_workers(owner: type, kwargs: Mapping[str, Any], device: torch.device, *, may_start: bool = True,
                   num_seeds: int | None = None, needs_workers: bool = False) -> dict[str, Any]:  # fmt: skip
    """Prepare arguments for DataLoader; options of workers are removed, with one report, unless workers are started.

    Args:
        may_start: True if workers can make these batches.
        num_seeds: Number of seeds to shuffle, if it is known.
        needs_workers: True if only Python makes the batches, so that options of workers are kept.
    """
    refuse_unknown(owner, kwargs, _TORCH_OPTIONS)
    _check_options(kwargs)
    kwargs = _drop(owner, kwargs)
    if num_seeds == 0:
        # torch refuses to shuffle an empty data set.
        kwargs = {k: v for k, v in kwargs.items() if k != "shuffle"}
    if needs_workers:
        return kwargs
    context = kwargs.get("multiprocessing_context")
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if kwargs.get("num_workers", 0) > 0 and method is not None and may_start:
        if method != "spawn" and device.type == "cuda":
            raise ArgumentError(
                f"multiprocessing_context must be 'spawn' with device={device}, got {method!r}: GPU memory and unified "
                "memory cannot be used in forked processes"
            )
        unused = {k: kwargs[k] for k in _NO_WORKERS_OPTIONS if kwargs.get(k, _WORKER_OPTIONS[k]) != _WORKER_OPTIONS[k]}
        warn_unused(unused, "workers hand on samples in order, and end with their epoch")
        return {k: v for k, v in kwargs.items() if k not in unused}
    absorbed = {k: v for k, v in kwargs.items() if k in _WORKER_OPTIONS and v != _WORKER_OPTIONS[k]}
    if absorbed:
        given = ", ".join(f"{k}={v!r}" for k, v in absorbed.items())
        start = "; worker processes start only with multiprocessing_context='spawn'" if may_start else ""
        warn(
            f"{given}: not needed and not used, as sampling and features come from the device itself{start}",
            LoaderWarning,
        )
    return {k: v for k, v in kwargs.items() if k not in _WORKER_OPTIONS}


def _drop(owner: type, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    # Lightning makes a loader again, with another sampler, out of the attributes of the first.
    is_remade = isinstance(getattr(kwargs.get("collate_fn"), "__self__", None), owner)
    given = {} if is_remade else {k: v for k, v in kwargs.items() if k in _DROPPED and v is not None}
    warn_unused(given, "the loader has its own")
    return {k: v for k, v in kwargs.items() if k not in _DROPPED}


def check_stores(data: Any, **given: Any) -> None:
    """Refuse options of rows for a graph in stores, which keep their own.

    Args:
        **given: The options, by name; None if not given.
    """
    for name, value in given.items():
        if value is not None and isinstance(data, (tuple, list)):
            raise ArgumentError(f"{name} must be None for a graph in stores, which keep their rows themselves, got "
                                f"{value!r}: give it to the FeatureStore, as far as that has it")  # fmt: skip


def check_custom_cls(data: Any, custom_cls: Any) -> None:
    """Warn that a class of batches is not used for a graph outside of stores, as in PyG."""
    if custom_cls is not None and not isinstance(data, (tuple, list)):
        warn_unused({"custom_cls": custom_cls}, "batches have the class of data, unless that is in stores")


def check_batch_size(size: Any) -> None:
    """Check a number of items per batch, or None."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1):
        raise ArgumentError(f"batch_size must be an integer of at least 1, or None, got {size!r}")


def _check_options(kwargs: Mapping[str, Any]) -> None:
    """Refuse options of DataLoader that torch accepts, or refuses without their name."""
    check_flag("shuffle", kwargs.get("shuffle"))
    check_batch_size(kwargs.get("batch_size"))
    workers, generator = kwargs.get("num_workers", 0), kwargs.get("generator")
    check_count("num_workers", workers, 0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentTypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    for name in ("sampler", "batch_sampler"):
        given = kwargs.get(name)
        if given is not None and not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise ArgumentTypeError(f"{name} must be iterable or None, got {type(given).__name__}")


def settle_sharing(cache_policy: str | None, cold_policy: str) -> dict[str, str]:
    """Check the arguments about memory shared by processes, and return them as a `Feature` takes them; empty without
    sharing.
    """
    known = (None, *POLICIES)
    check_choice("cache_policy", cache_policy, known)
    check_cold(cold_policy, cache_policy)
    if cache_policy is None and cold_policy != "auto":
        raise ArgumentError(f"cold_policy={cold_policy!r} needs a cache_policy, got None")
    return {} if cache_policy is None else {"cache_policy": cache_policy, "cold_policy": cold_policy}


def read_input_nodes(input_nodes: Any, name: str = "input_nodes", kind: str | None = None) -> Tensor | None:
    """Read ids or a mask as a tensor; PyG would take a mask in NumPy or a list, or fractional ids, for ids.

    Args:
        kind: Their node type; None without types.
    """
    if input_nodes is None:
        return None
    try:
        nodes = input_nodes if isinstance(input_nodes, Tensor) else torch.tensor(input_nodes, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        first = input_nodes[0] if isinstance(input_nodes, (list, tuple)) and len(input_nodes) else input_nodes
        hint = ": node types are those of a HeteroData" if kind is None and isinstance(first, str) else ""
        raise ArgumentTypeError(f"{name} must be ids or a mask, got {in_short(input_nodes)}{hint}") from error
    if nodes.dim() != 1:
        raise ArgumentError(f"{name} must have one dimension, got shape {tuple(nodes.shape)}")
    # The dtype of an empty list is meaningless: it becomes float. An empty mask still has the length of the graph.
    is_mask = nodes.dtype == torch.bool and isinstance(input_nodes, Tensor)
    return nodes if nodes.numel() > 0 or is_mask else nodes.long()


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


class _SampledOptions(TypedDict, total=False):
    """Options of `NeighborLoader` that tell which batches are sampled, for graphs in parts too."""

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
    uneven: str
    time_comparison: str
    time_window: int | None
    input_start_time: Tensor | None
    input_end_time: Tensor | None
    input_id: Tensor | None


class _PlanOptions(_SampledOptions, total=False):
    """Options of `NeighborLoader` that tell how neighbors are sampled, and where."""

    is_sorted: bool
    directed: bool
    device: Device
    topology_placement: str | None
    topology_cache: int | str | None
    sampling: str
    layer_dependency: bool
    super_batch: int | None
    ranks: tuple[int, int] | str | None
    custom_cls: Any


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


class DistSubGraphOptions(TorchOptions, _SampledOptions, total=False):
    """Options of `DistNeighborLoader` that `DistSubGraphLoader` takes."""

    ranks: str
    ahead: int
