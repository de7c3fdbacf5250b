"""The current stream, read and set."""

import pytest
import torch

from pyg_direct.runtime.cuda.launch import current_stream, kept_stream, set_stream, side_streams

pytestmark = pytest.mark.gpu


def test_the_current_stream_is_the_one_of_torch():
    stream, index = torch.cuda.Stream(), torch.cuda.current_device()

    with torch.cuda.stream(stream):
        inside = current_stream(index)

    assert inside == stream
    assert current_stream(index) == torch.cuda.current_stream()


def test_what_is_set_inside_is_undone_also_by_errors():
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()

    def fail():
        with kept_stream(stream.device_index):
            set_stream(stream)
            assert torch.cuda.current_stream() == stream
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert torch.cuda.current_stream() == before


def test_side_streams_are_two_and_stay():
    first, second = side_streams(torch.cuda.current_device())

    assert len({first, second, torch.cuda.current_stream()}) == 3
    assert side_streams(torch.cuda.current_device()) == (first, second)
    assert first.priority < torch.cuda.default_stream().priority
