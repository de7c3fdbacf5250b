"""What each frame of the preparing epoch takes: bytes, seconds of its stages and memory (PiPAD, section 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pyg_direct.dynamic.timeline import LANES, Timeline
from pyg_direct.runtime.device import count_allocated


class FrameCost(NamedTuple):
    """What a frame took.

    Attributes:
        first: Its first snapshot.
        moved_bytes: Copied to the device.
        seconds: Of each stage of `Timeline`; one may lie within another.
        held_bytes: Of the GPU's memory when it ended; 0 on a CPU.
        peak_bytes: The most of that memory since it began; 0 on a CPU.
    """

    first: int
    moved_bytes: int
    seconds: dict[str, float]
    held_bytes: int
    peak_bytes: int


class FrameMeter:
    """Takes the costs of frames by the spans of a timeline; nobody waits for the GPU until they are asked for.

    Peaks are torch's own, which begin anew with every frame.
    """

    def __init__(self, timeline: Timeline, device: torch.device, count_moved: Callable[[], int]) -> None:
        self._timeline, self._device, self._count_moved = timeline, device, count_moved
        self._on_gpu = device.type == "cuda"
        # First snapshot, bytes moved, spans before and after, bytes held and peak.
        self._frames: list[tuple[int, int, int, int, int, int]] = []

    @contextmanager
    def measure(self, first: int) -> Iterator[None]:
        """Note what the block takes as that of a frame; nothing of one that fails."""
        spans, moved, held, peak = self._timeline.count, self._count_moved(), 0, 0
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if self._on_gpu:
            held, peak, _ = count_allocated(self._device)
        self._frames.append((first, self._count_moved() - moved, spans, self._timeline.count, held, peak))

    def costs(self) -> list[FrameCost]:
        """Of all frames, in order."""
        spans, out = self._timeline.spans(), []
        for first, moved, begin, end, held, peak in self._frames:
            seconds = dict.fromkeys(LANES, 0.0)
            for lane, since, until in spans[begin:end]:
                seconds[lane] += until - since
            out.append(FrameCost(first, moved, {lane: s for lane, s in seconds.items() if s}, held, peak))
        return out
