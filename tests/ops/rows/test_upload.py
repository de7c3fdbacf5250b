"""Small arrays reach the device they are wanted on, whole."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.rows.upload import _PIECE_BYTES, upload, upload_large, upload_parts


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


def make_parts():
    """More than a piece in all, of which some are a piece and more, and one no bytes."""
    return [torch.arange(_PIECE_BYTES // 8 + 3).view(1, -1), torch.randn(5, 7).t(), torch.empty(0, 4),
            torch.arange(9).bool(), torch.randn(2, _PIECE_BYTES // 4 - 1, dtype=torch.float64)[:, 1:]]  # fmt: skip


def test_large_tensors_arrive(real_device):
    parts = make_parts()

    got = upload_large(parts, real_device)

    for mine, part in zip(got, parts, strict=True):
        assert (mine.device.type, mine.dtype) == (real_device.type, part.dtype)
        assert torch.equal(mine.cpu(), part)


@pytest.mark.gpu
def test_tensors_of_a_gpu_stay_and_page_locked_ones_are_sent():
    there, pinned = torch.randn(_PIECE_BYTES, device="cuda"), torch.randn(_PIECE_BYTES).pin_memory()

    same, sent = upload_large([there, pinned], torch.device("cuda", 0))

    assert same is there
    assert torch.equal(sent.cpu(), pinned)


@pytest.mark.gpu
def test_what_was_given_may_change_when_it_is_on_its_way():
    given = torch.zeros(4 * _PIECE_BYTES, dtype=torch.uint8)
    torch.cuda._sleep(200_000_000)

    (sent,) = upload_large([given], torch.device("cuda", 0))
    given += 1

    assert int(sent.max()) == 0
