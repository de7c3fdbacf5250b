import numpy as np
import pytest
import torch

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.sampling.random_key import EpochKey, batch_key, call_key, check_seed, draw_seed, shuffle_key
from tests.reference import draw as reference


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
@pytest.mark.parametrize("number", [0, 17, 255, 256, 2**40 + 1, 2**64 - 1])
def test_keys_match_the_reference(seed, number):
    got = batch_key(seed, 3, number), call_key(seed, number), shuffle_key(seed, 3)

    assert got == (reference.batch_key(seed, 3, number), reference.call_key(seed, number),
                   reference.shuffle_key(seed, 3))  # fmt: skip
    assert {type(key) for key in got} == {int}


def test_keys_are_frozen():
    got = batch_key(1, 2, 3), call_key(1, 2), shuffle_key(1, 2)

    assert got == (0x517630E6F045E74A, 0xD30A14708F7D96D0, 0xCD9E6E6B768D4354)


def test_no_two_batches_share_a_key():
    keys = {batch_key(seed, epoch, number) for seed in range(5) for epoch in range(10) for number in range(100)}
    keys |= {call_key(seed, number) for seed in range(5) for number in range(100)}
    keys |= {shuffle_key(seed, epoch) for seed in range(5) for epoch in range(10)}

    assert len(keys) == 5 * (10 * 100 + 100 + 10)


def test_an_epoch_knows_its_keys():
    key = EpochKey(7, 3)

    assert (key.of_batch(300), key.of_order()) == (batch_key(7, 3, 300), shuffle_key(7, 3))


@pytest.mark.parametrize("draw", [draw_seed, lambda: call_key(None, 5)])
def test_without_a_seed_one_is_drawn_from_the_generator_of_torch(draw):
    torch.manual_seed(77)
    seeds = [draw(), draw()]

    torch.manual_seed(77)
    again = [draw(), draw()]

    assert seeds == again
    assert seeds[0] != seeds[1]


def test_a_generator_is_drawn_from_as_torch_does():
    before = torch.get_rng_state()
    expected = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3))

    assert draw_seed(torch.Generator().manual_seed(3)) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("seed", "unsigned"), [(5, 5), (-1, 2**64 - 1), (2**64 + 3, 3), (np.int64(-1), 2**64 - 1), (np.uint32(7), 7)]
)
def test_any_integer_is_a_seed(seed, unsigned):
    assert check_seed(seed) == unsigned


@pytest.mark.parametrize("seed", [1.0, "1", True])
def test_other_seeds_are_refused(seed):
    with pytest.raises(ArgumentTypeError, match="seed must be an integer or None, got"):
        check_seed(seed)
