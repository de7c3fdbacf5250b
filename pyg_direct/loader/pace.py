"""How fast rows are read over the link ahead of training: as few blocks as keep ahead.

Blocks that wait for the link hold places of a model's own. Where reads are done long before their batch is asked for,
fewer of them read from then on; where training had to wait, more do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# Shares of the blocks that read at the full rate.
_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25)
# Batches in a row that were ready early before fewer blocks read, and those after which that is tried again where
# training had to wait.
_EARLY = 4
_HELD = 64
# Of the time between two batches: what ready early means.
_ROOM = 0.25
# Batches whose times are not known yet, at most: others are not looked at.
_MOST_OPEN = 16


class Pace:
    """Chooses the share of blocks by what the GPU says of the last batches; the host never waits for it.

    Args:
        limit: Called with the share of the blocks that read from now on.
        level: Where to begin; 0 for all blocks.

    Attributes:
        level: Where it stands, for the next epoch.
    """

    def __init__(self, limit: Callable[[float], None], level: int = 0) -> None:
        self._limit, self.level = limit, level
        self._early = self._held = 0
        self._open: deque[tuple[Any, Any]] = deque()
        self._asked_last: Any = None
        if level > 0:
            self._go(level)

    def note(self, asked: Any, ready: Any) -> list[Any]:
        """A batch is handed out; returns events that are free again.

        Args:
            asked: Event with a time, where training asked for it.
            ready: Event with a time, where its rows had been read.
        """
        free = self._read()
        if len(self._open) >= _MOST_OPEN:
            return [*free, asked, ready]
        self._open.append((asked, ready))
        return free + self._read()

    def _read(self) -> list[Any]:
        """Look at the batches whose times are known; returns events that are free again."""
        free = []
        while self._open and all(event.query() for event in self._open[0]):
            asked, ready = self._open.popleft()
            if self._asked_last is not None:
                self._look(ready.elapsed_time(asked), self._asked_last.elapsed_time(asked))
                free.append(self._asked_last)
            self._asked_last = asked
            free.append(ready)
        return free

    def _look(self, early: float, turn: float) -> None:
        """One batch: how long it was ready before it was asked for, and the time since the one before, milliseconds."""
        self._held = max(0, self._held - 1)
        if early < 0:
            # Training waited.
            self._early = 0
            if self.level > 0:
                self._held = _HELD
                self._go(self.level - 1)
            return
        self._early = self._early + 1 if early > _ROOM * turn else 0
        if self._early >= _EARLY and self._held == 0 and self.level + 1 < len(_SHARES):
            self._early = 0
            self._go(self.level + 1)

    def _go(self, level: int) -> None:
        self.level = level
        self._limit(_SHARES[level])

    def close(self) -> None:
        """All blocks read again."""
        self._open.clear()
        if self.level > 0:
            self._limit(_SHARES[0])


def make_event() -> Any:
    """An event that `Pace` can ask."""
    return torch.cuda.Event(enable_timing=True)
