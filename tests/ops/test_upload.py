"""Small arrays reach the device they are wanted on, whole."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.upload import upload


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
