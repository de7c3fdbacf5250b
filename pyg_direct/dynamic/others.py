"""What snapshots of frames have beside features, edges, weights and targets: messages, masks, days.

Each frame gets the snapshots' own. A recorded one reads fixed places instead, to which attributes of one shape are
moved with every frame; one that reads anything else that differs between snapshots is not recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.lazy import LazyTensor
from pyg_direct.errors import PygDirectError

# What frames have places of their own for, or of which a model may read the shape alone.
_OWN = ("x", "edge_index", "edge_attr", "y")


class NotReplayableError(PygDirectError, RuntimeError):
    """What a model does with a frame depends on more than arrays of fixed size."""


class Others:
    """Attributes of snapshots that frames hand on.

    Args:
        snapshots: All of them, in order, as a stream gives them.
        window: W, snapshots of a frame.
    """

    def __init__(self, snapshots: Sequence[Any], window: int) -> None:
        self._snapshots, self._window = snapshots, window
        # Fixed places of what has one shape in all snapshots, `[W, ...]`; and what a recorded frame must not read.
        self._places: dict[str, Tensor] = {}
        self._moving: frozenset[str] = frozenset()

    def fix(self, first: int) -> None:
        """Let there be fixed places, with what the frame that begins at snapshot `first` has."""
        keys = {key for snapshot in self._snapshots for key in snapshot.keys()} - {*_OWN}  # noqa: SIM118
        given = {key: [snapshot.get(key) for snapshot in self._snapshots] for key in sorted(keys)}
        changing = {key: values for key, values in given.items() if not _are_same(values)}
        fixed = {key: values for key, values in changing.items() if _are_alike(values)}
        self._places = {key: torch.stack(values[first : first + self._window]) for key, values in fixed.items()}
        self._moving = frozenset(changing.keys() - fixed.keys())

    def free(self) -> None:
        """Let there be no fixed places any more."""
        self._places, self._moving = {}, frozenset()

    def move(self, first: int) -> None:
        """Fill the fixed places for the frame that begins at snapshot `first`."""
        snapshots = self._snapshots[first : first + self._window]
        places = [place for places in self._places.values() for place in places.unbind(0)]
        if places:
            torch._foreach_copy_(places, [snapshot[key] for key in self._places for snapshot in snapshots])

    def take(self, number: int) -> Any:
        """A snapshot as it is, its own to change."""
        snapshot = copy.copy(self._snapshots[number])
        message = snapshot.get("edge_attr")
        if isinstance(message, LazyTensor):
            # What is fetched lives as long as the snapshot that is given out.
            snapshot["edge_attr"] = message.renew()
        return snapshot

    def take_fixed(self, number: int, place: int) -> Any:
        """The same to be recorded, at a place of the frame."""
        snapshot = copy.copy(self._snapshots[number])
        for key, places in self._places.items():
            snapshot[key] = places[place]
        message = snapshot.get("edge_attr")
        if message is not None:
            snapshot["edge_attr"] = LazyTensor(message, message.device, _refuse_messages)
        store = snapshot.stores[0]
        store._mapping = _Recorded(store._mapping, self._moving)
        return snapshot


class _Recorded(dict[str, Any]):
    """The attributes of a recorded snapshot, of which some must not be read: a replay would go on with their values."""

    def __init__(self, given: dict[str, Any], moving: frozenset[str]) -> None:
        super().__init__(given)
        self._moving = moving

    def _check(self, key: Any) -> None:
        if key in self._moving:
            raise NotReplayableError(f"the model reads {key}, which differs between snapshots and is no tensor of one "
                                     "shape")  # fmt: skip

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict, unless it must not be read."""
        self._check(key)
        return super().get(key, default)

    def __copy__(self) -> _Recorded:
        return _Recorded(self, self._moving)


def _refuse_messages() -> Tensor:
    raise NotReplayableError("the model reads edge_attr, messages of several numbers an edge")


def _are_same(values: Sequence[Any]) -> bool:
    """Whether an attribute is one object or number in all snapshots."""
    first = values[0]
    if isinstance(first, (bool, int, float, str)):
        return all(type(value) is type(first) and value == first for value in values)
    return all(value is first for value in values)


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether an attribute is an ordinary tensor of one shape in all snapshots."""
    kinds = {(value.shape, value.dtype, value.device) if _is_plain(value) else None for value in values}
    return len(kinds) == 1 and None not in kinds


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad
