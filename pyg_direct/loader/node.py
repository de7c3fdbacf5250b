"""`NodeLoader`: batches around nodes by any sampler, with rows fetched on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.store import check_store_dtype
from pyg_direct.loader.epochs import settle_workers
from pyg_direct.loader.general import GeneralLoader, Output
from pyg_direct.loader.sampler import NeighborSampler
from pyg_direct.ops.check import check_ids
from pyg_direct.typing import Device


class NodeLoader(GeneralLoader, PygNodeLoader):  # type: ignore[misc]
    """Batches around nodes, after PyG's `NodeLoader`, on `device`.

    Args:
        data: `Data`, `HeteroData` or (`FeatureStore`, `GraphStore`).
        node_sampler: A `pyg_direct.sampler.NeighborSampler`, or any sampler of PyG's interface.
        input_nodes: Seeds: ids, a mask, or None for all; (type, seeds) on a graph with types.
        input_time: A time for each seed, integers.
        transform: Called with every batch.
        transform_sampler_output: Called with the sampler's output before rows are fetched.
        filter_per_worker: Accepted; rows are always fetched on the device.
        custom_cls: Class of the batches of a graph in stores.
        input_id: An id for each seed, that batches hold instead of its position.
        device, placement, feature_cache, store_dtype, seed, prefetch: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`; options of workers are absorbed.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """

    def __init__(self, data: Any, node_sampler: Any, input_nodes: Any = None, input_time: Tensor | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, filter_per_worker: bool | None = None,
                 custom_cls: Any = None, input_id: Tensor | None = None, *, device: Device = None,
                 placement: str = "auto", feature_cache: int | str | None = None,
                 store_dtype: torch.dtype | None = None, seed: int | None = None, prefetch: int = 1,
                 **kwargs: Any) -> None:  # fmt: skip
        if device is None and isinstance(node_sampler, NeighborSampler):
            device = node_sampler.device
        self._settle(device, placement, None, feature_cache, 1, seed, prefetch)
        self._open_general(data, node_sampler, input_nodes, input_time, transform, transform_sampler_output,
                           custom_cls, input_id, store_dtype, kwargs)  # fmt: skip

    def _open_general(self, data: Any, node_sampler: Any, input_nodes: Any, input_time: Any, transform: Any,
                      transform_sampler_output: Any, custom_cls: Any, input_id: Any, store_dtype: torch.dtype | None,
                      kwargs: dict[str, Any]) -> None:  # fmt: skip
        """Check the inputs and hand them to PyG's loader."""
        check_store_dtype(store_dtype)
        self.store_dtype, self._sampler = store_dtype, node_sampler
        _check_input_nodes(data, input_nodes)
        kwargs = settle_workers(kwargs, self.device, may_start=False, stacklevel=4)
        _drop_shuffle_of_nothing(data, input_nodes, kwargs)
        PygNodeLoader.__init__(self, data, node_sampler, _as_seeds(input_nodes), input_time, transform,
                               transform_sampler_output, False, custom_cls, input_id, **kwargs)  # fmt: skip
        size = None
        if isinstance(node_sampler, NeighborSampler):
            sizes = node_sampler.num_nodes
            size = sizes[self.input_data.input_type] if isinstance(sizes, dict) else sizes
        self.input_data.node = check_ids("input_nodes", self.input_data.node, size).long()
        check_times("input_time", self.input_data.time, self.input_data.node.numel())

    def _input(self) -> Tensor:
        return self.input_data.node  # type: ignore[no-any-return]

    def _ask(self, positions: Tensor, key: int | None) -> Output:
        out: Output = self._sampler.sample_from_nodes(self.input_data[positions], **self._key(key))
        return out

    def _place_inputs(self, batch: Any, out: Output) -> None:
        part = batch if self.input_data.input_type is None else batch[self.input_data.input_type]
        input_id, time = out.metadata[:2]
        part.input_id, part.batch_size = input_id, input_id.numel()
        part.seed_time = time if time is None else time.to(self.device)


def check_times(name: str, times: Any, count: int) -> None:
    """Times of seeds: integers, one for each.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """
    if times is None:
        return
    if not isinstance(times, Tensor) or times.is_floating_point() or times.is_complex() or times.dtype == torch.bool:
        raise ArgumentTypeError(f"{name} must be a tensor of integers, got {getattr(times, 'dtype', type(times))}")
    if times.shape != (count,):
        raise ArgumentError(f"{name} must have shape ({count},), one for each seed, got {tuple(times.shape)}")


def _check_input_nodes(data: Any, input_nodes: Any) -> None:
    if not isinstance(data, HeteroData):
        return
    kind = input_nodes[0] if isinstance(input_nodes, (list, tuple)) and len(input_nodes) == 2 else input_nodes
    if not isinstance(kind, str):
        raise ArgumentTypeError(
            "input_nodes must be a node type or (node type, nodes) for a HeteroData, got "
            f"{'None' if input_nodes is None else type(input_nodes).__name__}"
        )
    if kind not in data.node_types:
        raise ArgumentError(f"input_nodes must name a known node type, got {kind!r} of {data.node_types}")
    nodes = input_nodes[1] if not isinstance(input_nodes, str) else None
    if isinstance(nodes, Tensor) and nodes.dtype == torch.bool and nodes.numel() != data[kind].num_nodes:
        raise ArgumentError(f"input_nodes must have shape [{data[kind].num_nodes}] as a mask, got {list(nodes.shape)}")


def _as_seeds(input_nodes: Any) -> Any:
    """Seeds as PyG's loader reads them right: sequences and arrays as tensors."""
    if isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        nodes = input_nodes[1]
        return input_nodes[0], nodes if nodes is None or isinstance(nodes, Tensor) else torch.as_tensor(nodes)
    return input_nodes


def _drop_shuffle_of_nothing(data: Any, input_nodes: Any, kwargs: dict[str, Any]) -> None:
    """torch refuses to shuffle nothing."""
    nodes = input_nodes[1] if isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 else input_nodes
    if isinstance(nodes, Tensor) and (int(nodes.sum()) if nodes.dtype == torch.bool else nodes.numel()) == 0:
        kwargs.pop("shuffle", None)
