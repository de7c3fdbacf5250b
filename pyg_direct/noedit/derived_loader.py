"""Loaders that a program derives from PyG's: PyG samples their seeds, and our loaders gather the rows of their batches.

PyG's `filter_fn` of nodes and of links, which such a class keeps or calls, builds a batch of a sampler's output. A
loader of ours builds it instead, over the same graph and sampler (`Filters`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader as PygNodeLoader
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct import loader as loaders
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, IdError
from pyg_direct.loader.base_loader import EpochLoader
from pyg_direct.noedit.program_record import note_left, note_made
from pyg_direct.noedit.replaced_class import find_device, show_batch
from pyg_direct.ops.compute_content_hash import glance_only

_REFUSALS = (ArgumentError, ArgumentTypeError, DeviceError, IdError, NotImplementedError)
_NAMES = "data", "transform", "transform_sampler_output", "node_sampler", "link_sampler", "neg_sampling"


class Filters:
    """Loaders of ours that build the batches of loaders of PyG.

    Args:
        options: Arguments of `install` for loaders.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        names = "device", "placement", "feature_cache"
        self._options = {name: options[name] for name in names if options.get(name) is not None}
        # By loader of PyG: the attributes for which ours was made, and ours, or None if there cannot be one.
        self._made: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()

    def serves(self, loader: Any, out: Any) -> bool:
        """Test if a loader of ours can build the batch of a sampler's output.

        A worker process leaves the GPU to its parent. Stores gather their own rows.
        """
        return (isinstance(out, (SamplerOutput, HeteroSamplerOutput))
                and not isinstance(loader, EpochLoader)
                and isinstance(getattr(loader, "data", None), (Data, HeteroData))
                and torch.utils.data.get_worker_info() is None
                and self._find(loader) is not None)  # fmt: skip

    def filter(self, loader: Any, out: Any) -> Any:
        """Build the batch of a sampler's output, as `filter_fn` of PyG's loader does."""
        ours = self._find(loader)
        with glance_only():
            ours._prepare()
        return ours.filter_fn(out)

    def _find(self, loader: Any) -> Any:
        """Find or make the loader of ours, again after the program replaced an attribute of its own."""
        # Held, so that no other object gets their addresses.
        held = tuple(getattr(loader, name, None) for name in _NAMES)
        known, ours = self._made.get(loader, ((), None))
        if len(known) != len(held) or any(a is not b for a, b in zip(known, held, strict=True)):
            try:
                ours = self._make(loader)
                note_made(f"rows of {type(loader).__name__}")
            except _REFUSALS as error:
                note_left(f"rows of {type(loader).__name__}", str(error))
                ours = None
            self._made[loader] = held, ours
        return ours

    def _make(self, loader: Any) -> Any:
        options = dict(self._options)
        if options.get("device") == "data":
            options["device"] = find_device(loader.data)
        given = loader.input_data
        options |= {"transform": partial(show_batch, loader.transform), "batch_size": loader.batch_size or 1,
                    "transform_sampler_output": loader.transform_sampler_output}  # fmt: skip
        if isinstance(loader, PygNodeLoader):
            seeds = given.node if given.input_type is None else (given.input_type, given.node)
            return loaders.NodeLoader(loader.data, loader.node_sampler, seeds, **options)
        links: Any = torch.stack([given.row, given.col])
        links = links if given.input_type is None else (given.input_type, links)
        return loaders.LinkLoader(loader.data, loader.link_sampler, links, neg_sampling=loader.neg_sampling, **options)
