"""Timeline of an epoch: the spans of its stages."""

from __future__ import annotations

from bisect import bisect

import torch

from pyg_direct.profiling import LaneSpans

# From top to bottom: on a thread, on the copy stream, on the stream that computes.
LANES = {"slice": "#9aa5b1", "copy": "#ed8936", "wait": "#c53030", "aggregate": "#2b6cb0", "move": "#63b3ed",
         "passes": "#38a169", "step": "#805ad5"}  # fmt: skip


class Timeline(LaneSpans):
    """Spans of stages: "slice" (edges sorted and matrices built, on a thread), "copy" (ahead of use), and "wait" (for
    such copies, within the next ones). Then "aggregate" (first layers), "move" (a frame's snapshots to their places),
    "passes" (forward and backward) and "step".

    On a GPU they are spans of the GPU, except for "slice".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, LANES)

    def hidden_share(self) -> float | None:
        """Return the share of the seconds of copies ahead of use for which the computing stream did not wait; None
        without such copies.

        A stream waits while a copy is in flight: the rest of a span "wait" is the host's time to queue it.
        """
        spans = self.spans()
        copies = [(first, last) for lane, first, last in spans if lane == "copy"]
        waits = [(first, last) for lane, first, last in spans if lane == "wait"]
        copied = sum(last - first for first, last in copies)
        # The stream copies one after the other, and each waits once for the next: no moment counts twice.
        copies.sort()
        ends, waited = [last for _, last in copies], 0.0
        for begin, end in waits:
            for first, last in copies[bisect(ends, begin) :]:
                if first >= end:
                    break
                waited += min(end, last) - max(begin, first)
        return max(0.0, 1 - waited / copied) if copied else None
