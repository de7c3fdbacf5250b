"""A cache that follows the reads: hot rows are chosen anew from counts that fade, on the GPU and without a wait.

With a tenth of the rows cached, and one percent of all rows changing places in each batch of a tenth of them, a cache
that is renewed every 25 batches serves 0.25 of the reads, one ranked by the first 20 batches 0.14; at five percent 0.14
and 0.10, at a fifth, where nothing read lately tells of what comes, 0.09 and 0.10. What is moved counts as missed.
`benchmarks/features/hot_rows.py` measures it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.rows.gather import Directory, gather_rows


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
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.renewed: torch.cuda.Event | None = None

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


class FollowingRows:
    """What a `Feature` does to follow its reads; its constructor sets the attributes."""

    device: torch.device
    _hot: Tensor | None
    _cold: Tensor | None
    _directory: Directory | None
    _max_blocks: int | None
    _reader: Any
    _resident: Any
    _handle: Any
    _following: ReadCounts | None

    def follow_reads(self, period: int = 25, fade: float = 0.8) -> None:
        """From now on, choose the hot rows anew after every `period` reads, by how often rows were read lately. For
        reads that drift; where they do not, rows ranked once (`expected_reads`) are served as well and cost less.

        Rows that stay hot are copied inside GPU memory, where the hot rows are held twice for that moment; rows that
        become hot are read over the link. Does nothing where no part of the rows is hot.

        Args:
            period: Reads between two choices; 0 to stop.
            fade: What is left of a count after a choice, in [0, 1].

        Raises:
            ArgumentError: named argument, rule and value, or no rows yet.
        """
        shape = self._filled()
        if isinstance(period, bool) or not isinstance(period, int) or period < 0:
            raise ArgumentError(f"period must be an integer of at least 0, got {period!r}")
        if not 0 <= fade <= 1:
            raise ArgumentError(f"fade must lie in [0, 1], got {fade!r}")
        self._following = self._reader = None
        can_follow = self._directory is not None and self._cold is not None and self._handle is None
        if period > 0 and can_follow:
            self._following = ReadCounts(shape[0], period, fade, self.device)

    def _order_reads(self) -> None:
        """Have the current stream wait for the rows that are hot now."""
        following = self._following
        assert following is not None
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in following.streams:
            following.streams[stream.cuda_stream] = stream
            if following.renewed is not None:
                stream.wait_event(following.renewed)

    def _follow(self, ids: Tensor) -> None:
        """Count a read, and choose the hot rows anew when it is time."""
        following, hot, directory = self._following, self._hot, self._directory
        if following is None or hot is None or directory is None or not following.note(ids):
            return
        assert self._cold is not None
        chosen = following.choose(len(hot))
        self._hot = gather_rows(hot, chosen, cold=self._cold, directory=directory, max_blocks=self._max_blocks)
        self._directory = Directory.of(chosen, len(self._cold))
        self._reader = None
        for stream in following.streams.values():
            for old in (hot, *directory):
                old.record_stream(stream)
        current = torch.cuda.current_stream(self.device)
        following.streams = {current.cuda_stream: current}
        following.renewed = torch.cuda.Event()
        following.renewed.record(current)

    # What the rest of a `Feature` does.

    def _filled(self) -> torch.Size:
        raise NotImplementedError
