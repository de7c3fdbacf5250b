"""Torch's current stream, read and set without what `torch.cuda.stream` does around it.

A loader changes streams several times a batch; at 5 to 10 us each that would be a quarter of its time on the host.
"""

from __future__ import annotations

import functools

import torch


def current_stream(index: int) -> torch.cuda.Stream:
    """The current stream of GPU `index`."""
    return _stream_of(*torch._C._cuda_getCurrentStream(index))


@functools.cache
def _stream_of(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def set_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream the current one of its GPU, and its GPU the current one."""
    torch._C._cuda_setStream(stream_id=stream.stream_id, device_index=stream.device_index,
                             device_type=stream.device_type)  # fmt: skip


def is_current(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is the current one of its GPU, and its GPU the current one."""
    index = stream.device_index
    return bool(torch._C._cuda_getCurrentRawStream(index) == stream.cuda_stream and torch._C._cuda_getDevice() == index)


@functools.cache
def side_streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams of GPU `index` for what is made ahead, the same ones in all of a process.

    Torch's allocator keeps the memory of each stream apart: of new ones, every piece would be asked of the driver anew.
    Their blocks come first where others could start too.
    """
    return torch.cuda.Stream(index, priority=-1), torch.cuda.Stream(index, priority=-1)


class kept_stream:  # noqa: N801
    """`with kept_stream(index):` whatever is set inside, the current stream and GPU are afterwards as they were."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._stream = current_stream(self._index)

    def __exit__(self, *error: object) -> None:
        set_stream(self._stream)
        if self._device != self._index:
            torch.cuda.set_device(self._device)
