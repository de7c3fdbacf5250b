"""Small arrays reach the device they are wanted on, whole."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.upload import upload, upload_parts


@pytest.mark.parametrize(
    "words", [np.arange(5), torch.arange(5), np.arange(10)[::2] // 2], ids=["array", "tensor", "strided"]
)
def test_words_arrive(device, words):
    got = upload(words, device)

    assert (got.tolist(), got.device.type) == ([0, 1, 2, 3, 4], device.type)


@pytest.mark.gpu
def test_words_of_a_gpu_are_waited_for():
    words = torch.zeros(50_000, dtype=torch.int64, device="cuda")

    torch.cuda._sleep(200_000_000)
    words += 7

    assert upload(words, torch.device("cpu")).unique().tolist() == [7]


def test_parts_travel_together_and_are_written_to_apart(real_device):
    parts = [torch.arange(3), torch.arange(0), torch.arange(5)]

    got = upload_parts(parts, real_device)

    assert [part.tolist() for part in got] == [part.tolist() for part in parts]
    assert {part.device.type for part in got} == {real_device.type}
    got[0].add_(1)
    assert (got[0]._version, got[2]._version) == (1, 0)
    assert parts[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("parts", [[None, None], [torch.arange(2), None], [torch.arange(2), torch.ones(1)], []])
def test_parts_that_differ_travel_alone(real_device, parts):
    got = upload_parts(parts, real_device)

    assert [None if part is None else (part.dtype, part.tolist()) for part in got] == \
        [None if part is None else (part.dtype, part.tolist()) for part in parts]  # fmt: skip
