"""Links as what a plan on a GPU samples around: negatives are drawn in its graph, and their ends placed there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ends:
    """The ends of links and of uniform negatives, as seeds of a plan with `unique_seeds`.

    Args:
        sources, targets: Nodes at either end of the links, int64 `[L]` on the CPU, checked before.
        more_sources, more_targets: Negatives at either end, drawn under the key of the batch as `draw_negatives` does.
        has_labels: Whether a label is wanted for each pair of a source and a target.
    """

    is_cuda = False

    def __init__(self, sources: Tensor, targets: Tensor, more_sources: int, more_targets: int,
                 has_labels: bool) -> None:  # fmt: skip
        self.sources, self.targets = sources, targets
        self.more_sources, self.has_labels = more_sources, has_labels
        self.num_links = sources.shape[0]
        self.num_pairs = self.num_links + more_sources
        self._count = self.num_pairs + self.num_links + more_targets

    def numel(self) -> int:
        """How many ends there are."""
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """A given end, by its place among all."""
        return self.sources[place] if place < self.num_links else self.targets[place - self.num_pairs]


class PlacedEnds(NamedTuple):
    """Where the ends of links stand in a batch.

    Attributes:
        places: Local ids: sources, those of negatives, targets, those of negatives; int64 `[n]`.
        labels: 1 for given links and 0 for negatives, float32 `[L + negatives]`; empty unless asked for.
    """

    places: Tensor
    labels: Tensor
