"""Where the rows of a graph live, chosen by what is free, and the line that says so."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pyg_direct.errors import ArgumentError

# Rows of at most so many bytes, such as labels and masks, go to the GPU also where wider ones stay on the host: a
# read over the link costs the same for one byte as for a line.
_NARROW_ROW = 16
_SAID: set[str] = set()
# Where attributes may live, and topologies.
PLACEMENTS = ("auto", "cuda", "unified", "pinned", "cpu")
PLACES = (*PLACEMENTS, "peer")


def check_place(name: str, place: str, device: torch.device, known: Sequence[str] = PLACEMENTS) -> None:
    """Refuse a placement that is none, or that the device cannot read.

    Raises:
        ArgumentError: named argument, rule and value.
    """
    if place not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {place!r}")
    if (place == "cpu") != (device.type == "cpu") and place != "auto":
        allowed = [other for other in known if other == "auto" or (other == "cpu") == (device.type == "cpu")]
        raise ArgumentError(f"{name} must be one that device={device} can read, got {place!r}: take "
                            f"{' or '.join(map(repr, allowed))}")  # fmt: skip


class Rows(NamedTuple):
    """One attribute that is to be placed: its key, size, length and whether its hot rows may be copied to the GPU."""

    key: Any
    num_bytes: int
    num_rows: int
    may_be_cached: bool

    @property
    def is_narrow(self) -> bool:
        """Whether a row is so short that reading it over the link would be a waste."""
        return self.num_bytes <= _NARROW_ROW * self.num_rows


class Choice(NamedTuple):
    """Where an attribute lives: `cuda`, or `host` with so many bytes of hot rows in GPU memory."""

    place: str
    hot_bytes: int = 0


def choose_places(attributes: Sequence[Rows], budget: int, *, is_auto: bool, fill_cache: bool) -> dict[Any, Choice]:
    """Places of attributes in the order in which GPU memory does most good: short rows, then small tables whole, then
    the hot rows of the others, each in proportion to its size.

    Args:
        attributes: What is to be placed.
        budget: GPU memory in bytes that they may take together.
        is_auto: Whether wide attributes may go to the GPU; short ones may in any case, up to a quarter of the budget
            each.
        fill_cache: Whether what is left of the budget goes to hot rows.
    """
    places = {}
    for rows in sorted(attributes, key=lambda rows: rows.num_bytes):
        fits = rows.num_bytes <= budget if is_auto else rows.is_narrow and 4 * rows.num_bytes <= budget
        places[rows.key] = Choice("cuda" if fits else "host")
        budget -= rows.num_bytes if fits else 0
    cached = [rows for rows in attributes if rows.may_be_cached and places[rows.key].place == "host"]
    total = sum(rows.num_bytes for rows in cached)
    if fill_cache and budget > 0:
        for rows in cached:
            places[rows.key] = Choice("host", budget * rows.num_bytes // total)
    return places


class Placed(NamedTuple):
    """What came of a choice: name, size, where, and the share of it that is also in GPU memory."""

    name: str
    num_bytes: int
    where: str
    hot_share: float = 0.0


def describe(parts: Iterable[Placed]) -> str:
    """One line, such as `topology 1.0 GB on cuda:0, x 9.5 GB unified (12 % hot in GPU memory)`."""
    words = []
    for part in parts:
        where = f"on {part.where}" if ":" in part.where else part.where
        hot = f" ({100 * part.hot_share:.0f} % hot in GPU memory)" if part.hot_share > 0 else ""
        words.append(f"{part.name} {in_words(part.num_bytes)} {where}{hot}")
    return ", ".join(words)


def in_words(num_bytes: int) -> str:
    """Bytes in the largest unit that gives at least 1, such as `9.5 GB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def announce(line: str) -> None:
    """Log a line at level INFO of the logger `pyg_direct.notice`, once; seen on stderr unless logging is set up
    otherwise. All else that the package logs is quiet then.
    """
    if line in _SAID:
        return
    _SAID.add(line)
    tree, logger = logging.getLogger("pyg_direct"), logging.getLogger("pyg_direct.notice")
    if logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.INFO if tree.level == logging.NOTSET else logging.NOTSET)
    is_heard = any(_has_handlers(one) for one in (logger, tree, logging.getLogger()))
    shown = next((handler for handler in logger.handlers if isinstance(handler, _Shown)), None)
    if is_heard and shown is not None:
        # The program has set logging up since.
        logger.removeHandler(shown)
    if not is_heard and shown is None:
        handler = _Shown()
        handler.setFormatter(logging.Formatter("pyg_direct: %(message)s"))
        logger.addHandler(handler)
    logger.info(line)


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows lines where nobody else does."""


def _has_handlers(logger: logging.Logger) -> bool:
    """Whether somebody else listens."""
    return not all(isinstance(handler, (logging.NullHandler, _Shown)) for handler in logger.handlers)
