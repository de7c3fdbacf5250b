"""The current stream, read and set."""

import pytest
import torch

from pyg_direct.runtime.stream import current_stream, kept_stream, set_stream

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
