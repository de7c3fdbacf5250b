"""One case: a subject, a row of its options and a number, which together say all; and the line that runs it again."""

from __future__ import annotations

import shlex
import warnings
from dataclasses import dataclass
from random import Random

import torch

from pyg_direct.errors import LoaderWarning
from tests.fuzz import (
    aggregates,
    convolutions,
    features,
    frames,
    layers,
    links,
    neighbors,
    node_sets,
    partitions,
    producers,
    replays,
    small_graphs,
    snapshots,
    stores,
)
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import threads_of

SUBJECTS = {"neighbors": neighbors, "links": links, "layers": layers, "features": features,
            "aggregates": aggregates, "convolutions": convolutions, "snapshots": snapshots,
            "frames": frames, "partitions": partitions, "stores": stores, "producers": producers,
            "replays": replays, "node_sets": node_sets, "small_graphs": small_graphs}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is run."""

    subject: str
    device: str
    number: int
    row: Row

    @property
    def space(self) -> Space:
        """The options of the subject."""
        return SUBJECTS[self.subject].space(self.device)

    def line(self) -> str:
        """The command that runs this case alone."""
        words = " ".join(f"{name}={value}" for name, value in self.row.items())
        text = f"{self.subject} {self.device} {self.number} {words}"
        return f"python -m tests.fuzz --case {shlex.quote(text)}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of a line."""
        subject, device, number, *words = text.split()
        return cls(subject, device, int(number), dict(word.split("=", 1) for word in words))

    def run(self) -> int:
        """Batches that were as expected; raises at the first that is not."""
        torch.manual_seed(self.number)
        with warnings.catch_warnings(), threads_of(self.row):
            warnings.simplefilter("error")
            # Relations without a reverse, negatives that no draw found.
            warnings.simplefilter("ignore", LoaderWarning)
            warnings.filterwarnings("ignore", "hotness='frequency'", DeprecationWarning)
            return SUBJECTS[self.subject].run(self.row, Random(self.number), self.device)
