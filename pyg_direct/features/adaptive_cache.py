"""A cache that follows the reads: hot rows are chosen anew from counts that fade, on the GPU and without a wait.

With a tenth of the rows cached, and one percent of all rows changing places in each batch of a tenth of them, a cache
that is renewed every 25 batches serves 0.25 of the reads, one ranked by the first 20 batches 0.14; at five percent 0.14
and 0.10, at a fifth, where nothing read lately tells of what comes, 0.09 and 0.10. What is moved counts as missed.
`benchmarks/features/hot_rows.py` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ReadCounts:
    """Counts of reads that fade.

    Args:
        num_rows: N.
        period: Reads after which rows are chosen anew.
        fade: What is left of a count by then.
        device: Where ids are.
    """

    def __init__(self, num_rows: int, period: int, fade: float, device: torch.device) -> None:
        # One place more, for ids that are none.
        self._counts = torch.zeros(num_rows + 1, device=device)
        self._one = torch.ones(1, device=device)
        self._period, self._fade, self._number = period, fade, 0
        # Streams that have read the rows that are hot now, and what they wait for before they do.
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._renewed: torch.cuda.Event | None = None

    def note(self, ids: Tensor) -> bool:
        """Count a read; whether it is time to choose anew."""
        last = self._counts.numel() - 1
        known = torch.where((ids >= 0) & (ids < last), ids, last)
        self._counts.index_add_(0, known.long(), self._one.expand(ids.numel()))
        self._number += 1
        return self._number % self._period == 0

    def choose(self, count: int) -> Tensor:
        """The rows read most lately, ascending."""
        ids = self._counts[:-1].topk(count, sorted=False).indices.sort().values
        self._counts.mul_(self._fade)
        return ids

    def order_reads(self, device: torch.device) -> None:
        """Have the current stream of a GPU wait for the rows that are hot now."""
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = stream
            if self._renewed is not None:
                stream.wait_event(self._renewed)

    def hand_over(self, old: Sequence[Tensor], device: torch.device) -> None:
        """Keep what was hot until all streams have read it; others wait for what the current stream has put there."""
        for stream in self._streams.values():
            for tensor in old:
                tensor.record_stream(stream)
        current = torch.cuda.current_stream(device)
        self._streams = {current.cuda_stream: current}
        self._renewed = torch.cuda.Event()
        self._renewed.record(current)
