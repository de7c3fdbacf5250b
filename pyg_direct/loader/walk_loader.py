"""Batches of positive random walks and of negative walks, for training of skip-gram models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.loader.arguments import settle_workers
from pyg_direct.loader.base_loader import ALONE, EpochLoader, make_batch
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.option_types import TorchOptions
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.loader.profiler import EpochRecord
from pyg_direct.ops.rows.upload import upload
from pyg_direct.sampling.random_key import EpochKey
from pyg_direct.typing import Device


class Walks(Protocol):
    """A model whose batches are walks."""

    @property
    def is_own(self) -> bool:
        """True if the program overrides no method that draws walks."""

    def open_walks(self, device: torch.device) -> str:
        """Place the topology of the walks, and return a line about it."""

    def draw_walks(self, nodes: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Draw positive walks from nodes on the device, and negative walks, under a key."""


class WalkLoader(EpochLoader, DataLoader):  # type: ignore[misc,type-arg]
    """Pairs (positive walks, negative walks) of the nodes of a model, on `device`, as from PyG's `model.loader()`.

    Batches are functions of seed, epoch and number. On a GPU each is enqueued on request, without a wait; on a CPU they
    are prefetched.

    Args:
        walks: The model that draws walks.
        num_nodes: Start nodes of walks.
        device, seed, prefetch, ranks, uneven: See `NeighborLoader`.
        **kwargs: Arguments of `torch.utils.data.DataLoader`, such as `batch_size` and `shuffle`; options of workers are
            absorbed.

    Raises:
        ArgumentError, ArgumentTypeError: named argument, rule and value.
    """

    transform = None
    transform_sampler_output = None
    _item = ("node", None)

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...  # type: ignore[override]

    def __init__(self, walks: Walks, num_nodes: int, *, device: Device = None, seed: int | None = None,
                 prefetch: int = 1, ranks: tuple[int, int] | str | None = None, uneven: str = "pad",
                 **kwargs: Unpack[TorchOptions]) -> None:  # fmt: skip
        self._settle(device, "auto", None, None, 1, seed, prefetch, ranks, uneven)
        if "filter_per_worker" in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} has no option filter_per_worker: its batches are no graphs")
        self._walks, self._nodes = walks, torch.arange(num_nodes, device="cpu")
        options = settle_workers(type(self), kwargs, self.device, may_start=False, num_seeds=num_nodes)
        with torch.device("cpu"):
            DataLoader.__init__(self, range(num_nodes), **options)  # type: ignore[arg-type]

    def _prepare(self) -> None:
        self._place = self._walks.open_walks(self.device)

    def _input(self) -> Tensor:
        return self._nodes

    def _is_own(self) -> bool:
        return self._walks.is_own

    def _submit(self, key: EpochKey, number: int, seeds: Seeds) -> _Drawn:
        return _Drawn(self._walks.draw_walks(upload(seeds.nodes, self.device), key.of_batch(number)))

    def _fetch(self, sample: Any, number: int, seeds: Seeds, shared: Mapping[str, SharedRows] = ALONE) -> Any:
        return sample.batch

    def _work_here(self, key: EpochKey, batches: Iterator[tuple[int, Seeds]], record: EpochRecord | None = None
                   ) -> Iterator[Any]:  # fmt: skip
        if self.device.type == "cpu":
            yield from super()._work_here(key, batches, record)
            return
        stages = self._stages(key, record)
        for number, seeds in batches:
            yield make_batch(stages, number, seeds)

    def _list_places(self) -> tuple[list[str], Mapping[str, Any]]:
        self._prepare()
        return [self._place], {}


class _Drawn:
    """A complete batch."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def finish(self) -> _Drawn:
        """Return itself: there is no wait."""
        return self
