"""What loaders know of samplers of ours, beyond PyG's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.sampler import BaseSampler

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.options import say_unused
from pyg_direct.sampling.key import call_key
from pyg_direct.typing import Device


class OwnSampler(BaseSampler):  # type: ignore[misc]
    """A sampler on `device` whose draws are functions of a key, and whose results have final edge ids there."""

    device: torch.device
    seed: int
    _num_calls: int
    edge_permutation = None
    # Whether edges lead to the nodes expanded.
    sample_direction = "forward"

    @property
    def num_nodes(self) -> int | dict[str, int]:
        """Number of nodes, by type where there are types."""
        raise NotImplementedError

    @property
    def max_degree(self) -> int | None:
        """Upper bound of the edges of one relation that a node of a sample has; None for none."""
        return None

    def refresh(self) -> None:
        """Read the graph anew, so that edits take effect."""
        raise NotImplementedError

    def _open_topology(self) -> Any:
        """The topology, which ranks rows for caches."""
        raise NotImplementedError

    def summarise(self) -> str:
        """The topology in a line, for reports."""
        return f"topology: {self._open_topology()}"

    def _next_key(self) -> int:
        """The key of the next call outside an epoch."""
        self._num_calls += 1
        return call_key(self.seed, self._num_calls - 1)


def check_sampler(name: str, sampler: Any, method: str) -> None:
    """Raise unless a sampler, an argument of this name, can be asked for samples by `method`."""
    if not callable(getattr(sampler, method, None)):
        raise ArgumentTypeError(f"{name} must have {method}, as PyG's BaseSampler, got {type(sampler).__name__}")


# Of the arguments that a sampler is made of.
_DEFAULTS = {"replace": False, "subgraph_type": "directional", "disjoint": False, "temporal_strategy": "uniform",
             "is_sorted": False, "directed": True, "time_comparison": "<="}  # fmt: skip


def check_is_used(sampler: Any, own: Mapping[str, Any], of_pyg: Mapping[str, Any]) -> None:
    """Refuse options of sampling beside a sampler, which has its own; PyG drops those that it has, which is said.

    Args:
        sampler: The sampler given; None where the loader makes one of these options.
        own, of_pyg: Options that PyG does not have, and that it has, by name.

    Raises:
        ArgumentError: one of `own` is given beside a sampler.
    """
    if sampler is None:
        return
    for name, value in own.items():
        if value != _DEFAULTS.get(name):
            raise ArgumentError(f"{name}={value!r} needs neighbor_sampler=None: it belongs to the sampler, if one is "
                                "given")  # fmt: skip
    unused = {name: value for name, value in of_pyg.items()
              if getattr(value, "value", value) != _DEFAULTS.get(name)}  # fmt: skip
    say_unused(unused, "they belong to neighbor_sampler, which is given")


def device_for(device: Device, sampler: Any) -> Device:
    """The device asked for; where none is, that of a sampler of ours."""
    return sampler.device if device is None and isinstance(sampler, OwnSampler) else device
