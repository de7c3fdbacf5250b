"""Base of loaders whose batches are sets of nodes with the edges among them.

`RandomNodeLoader` takes a share of all nodes, `ClusterLoader` some clusters, GraphSAINT's samplers draw nodes.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError, whole_file
from pyg_direct.features.row_dtypes import check_store_dtype
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.arguments import settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, is_said_anew
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.collate.data import Attributes, summarise
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.nn.sorted_edges import register_sorted
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampler.graph_reader import refuse_features
from pyg_direct.sampling.induced_plan import InducedPlan
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.sampling.sampling_options import Sample
from pyg_direct.typing import Device

# Fields of a sample that batches of PyG's loaders of these names do not have.
_UNTOLD = ("n_id", "e_id", "num_sampled_nodes", "num_sampled_edges", "input_id")
# Key of the rows of `batch`; other loaders leave these rows out, and use the name for the tree of each node.
_TREES = "batch of the graph"


class InducedLoader(EpochLoader):
    """Batches of subgraphs that sets of nodes induce in a `Data`.

    Subclasses choose the nodes of a batch (`_submit`), the topology (`_open_topology`) and the attributes of batches
    (`_show`).
    """

    data: Any
    transform = None
    transform_sampler_output = None
    store_dtype: torch.dtype | None = None
    _general: Any = None
    _plan: InducedPlan | None = None
    # The topology of the plan.
    _plan_topology: CSRTopo | None = None
    # Methods that a subclass of PyG's loader may override, and that ours does not call.
    _pyg_hooks: tuple[str, ...] = ()
    # Direction of the rows from which a batch's edges come.
    _direction = "in"

    def _open_induced(self, data: Any, num_items: int, batch_size: int, device: Device, placement: str,
                      topology_placement: str | None, feature_cache: int | str | None,
                      store_dtype: torch.dtype | None, seed: int | None, prefetch: int, ranks: Any, uneven: str,
                      kwargs: Mapping[str, Any]) -> None:  # fmt: skip
        """Check the arguments and open torch's loader over `num_items` items."""
        self._check_pyg_hooks()
        self._settle(device, placement, topology_placement, feature_cache, 1, seed, prefetch, ranks, uneven)
        check_store_dtype(store_dtype)
        refuse_features(data)
        self.data, self.store_dtype = data, store_dtype
        if "filter_per_worker" in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} has no option filter_per_worker: its collate_fn makes "
                                    "batches, as PyG's")  # fmt: skip
        kwargs = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=num_items)
        if kwargs.get("batch_sampler") is None:
            kwargs = {"batch_size": batch_size, **kwargs}
        self._items = torch.arange(num_items, device="cpu")
        # On the CPU, even if torch's default device is another.
        with torch.device("cpu"):
            DataLoader.__init__(self, range(num_items), collate_fn=self._collate_items, **kwargs)  # type: ignore[arg-type]

    def _open_topology(self) -> CSRTopo:
        """Return the rows from which edges of batches come; the same object as long as the graph has the same edges."""
        raise NotImplementedError

    def _show(self) -> Data:
        """Return the graph with the attributes of batches."""
        return self.data  # type: ignore[no-any-return]

    def _check_pyg_hooks(self) -> None:
        """Refuse hooks that would not be called.

        Raises:
            NotImplementedError: the class, or the loader, overrides a hook of PyG's loader.
        """
        for hook in self._pyg_hooks:
            if is_said_anew(self, hook):
                raise NotImplementedError(f"{hook} of {type(self).__qualname__} would not be called, as batches are "
                                          "made ahead: derive the class from PyG's loader")  # fmt: skip

    def _prepare(self) -> Any:
        # A hook may have been assigned since.
        self._check_pyg_hooks()
        topology = self._open_topology()
        if self._plan is None or self._plan_topology is not topology:
            self._plan = InducedPlan(topology.place(self.topology_placement, self.device), self._direction)
            self._plan_topology = topology
        self._renew_rows()
        return self._general

    def _summarise_places(self) -> Iterable[Placed] | None:
        if self._general is None:
            return None
        if self._plan is None or self._plan_topology is None:
            # Of a graph with types.
            return self._general.summarise()  # type: ignore[no-any-return]
        return [summarise(self._plan_topology, self._plan.topology), *self._general.summarise()]

    def _renew_rows(self) -> None:
        assert self._plan_topology is not None
        shown = self._show()
        if "batch" in shown._store._mapping:
            shown = copy.copy(shown)
            mapping = shown._store._mapping
            mapping[_TREES] = mapping.pop("batch")
        self._shown = shown
        counts = {"node": self._plan_topology.node_count, "edge": self._plan_topology.edge_count}
        self._general = Attributes(shown, None, self.device, self.placement, self.feature_cache, self.store_dtype,
                                   counts=counts)  # fmt: skip
        # Marks follow assignments to the user's graph, not to a copy of it.
        self._general.marks = Marks(self.data)

    def _rows(self) -> Any:
        return self._general

    def _input(self) -> Tensor:
        return self._items

    def _fetch(self, sample: Sample, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Data:
        return self._build(sample)

    def _build(self, sample: Sample) -> Data:
        """Build the batch of a sample, with PyG's attributes."""
        none = sample.n_id[:0]
        # torch's idle threads spin for a while, in parallel with the loops that read features.
        with one_thread(self.device.type == "cpu"):
            batch: Data = self._general.build(self._shown, sample, none, counts_seeds=False)
        mapping = batch._store._mapping
        for key in _UNTOLD:
            if key not in self._shown._store._mapping:
                mapping.pop(key, None)
        if _TREES in mapping:
            mapping["batch"] = mapping.pop(_TREES)
        edge_index = mapping.get("edge_index")
        if self._direction == "in" and type(edge_index) is Tensor:
            register_sorted(edge_index, sample.num_sampled_nodes, sample.num_sampled_edges)
        return batch

    def _collate_items(self, index: Any) -> Any:
        """Make the batch of items at these positions, for direct calls of the program."""
        raise NotImplementedError

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        attributes = self._prepare() if self._general is None else self._general
        return [f"topology: {self._plan_topology}"], attributes.describe()

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> Any:
        raise NotImplementedError


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Check an integer argument of at least `least`.

    Raises:
        ArgumentError: named argument, rule and value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def load_saved(name: str, kind: str, path: Path, known: Sequence[type] = ()) -> Any:
    """Load a file of `save_whole` or PyG; only tensors and objects of known classes.

    Args:
        name: The argument that names the file.
        kind: Required content of the file.
        path: The file.
        known: Classes that it may hold.

    Raises:
        ArgumentError: the file is damaged, or holds another object.
    """
    with whole_file(name, kind, path), torch.serialization.safe_globals(list(known)):
        try:
            return torch.load(path, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(str(error).partition("\n")[0]) from error


def save_whole(value: Any, path: Path) -> None:
    """Save a value atomically: readers see a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(value, written)
    written.replace(path)
