"""Sampling in worker processes, for those who ask for them: workers sample on the CPU, features are fetched here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyg_direct.graph.topology import CSRTopo
from pyg_direct.loader.batches import Seeds
from pyg_direct.sampling.key import EpochKey
from pyg_direct.sampling.open import Plan, open_plan
from pyg_direct.sampling.sample import Recipe, Sample


class WorkItem(list[int]):
    """Positions of a batch, with its number; a list, as DataLoader wants it."""

    def __init__(self, positions: Tensor, number: int) -> None:
        super().__init__(positions.tolist())
        self.number = number

    def __reduce__(self) -> Any:
        return WorkItem, (torch.tensor(list(self), dtype=torch.int64, device="cpu"), self.number)


class Positions(Dataset[Any]):
    """The positions 0 .. count-1 of the input nodes; a batch of them is fetched as it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> int:
        return position

    def __getitems__(self, positions: list[int]) -> list[int]:
        """The positions of a batch, as DataLoader asks for them."""
        return positions


class WorkerSampler:
    """`collate_fn` of worker processes: samples on the CPU the batch that any device would sample."""

    def __init__(self, csr_topo: CSRTopo, recipe: Recipe, key: EpochKey, input_nodes: Tensor) -> None:
        self.csr_topo, self.recipe, self.key, self.input_nodes = csr_topo, recipe, key, input_nodes
        self._plan: Plan | None = None

    def __call__(self, item: Any) -> tuple[WorkItem, Sample]:
        """The sample of a `WorkItem`."""
        if self._plan is None:
            self._plan = open_plan(self.csr_topo.place("cpu", "cpu"), self.recipe)
        seeds = self.input_nodes[torch.tensor(list(item), dtype=torch.int64, device="cpu")]
        return item, self._plan.sample(seeds, self.key.of_batch(item.number))  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def number_items(batches: Iterator[tuple[int, Seeds]]) -> Iterator[WorkItem]:
    """Work items of an epoch."""
    for number, seeds in batches:
        yield WorkItem(seeds.positions, number)
