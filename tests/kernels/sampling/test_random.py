"""Draws are frozen: the numbers below may only change with a minor version."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import THREADS, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.sampling.random import draw, draw_below
from pyg_direct.ops.run_kernel import grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.sampling.draw_random import derive_key
from tests.reference import draw as reference

# Known answers of Random123 for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# (key, item, slot) -> 64 bits.
DRAWS = [
    ((0, 0, 0), 0xE169C58D6627E8D5),
    ((1, 0, 0), 0xE50A0EBCE3E80670),
    ((0, 1, 0), 0x5CB200DBF8E4CCA4),
    ((0, 0, 1), 0xF08D6EAA844515E1),
    ((2**64 - 1, 2**63, 2**32), 0x87B4E8E39906CA08),
    ((42, 123_456_789_012, 7), 0x66008F31C156E79B),
]
# (key, item, slot, bound) -> integer below the bound.
DRAWS_BELOW = [
    ((7, 5, 0, 10), 3),
    ((7, 5, 1, 10), 2),
    ((7, 5, 2, 1), 0),
    ((7, 5, 3, 2**31), 934_094_502),
    ((7, 5, 4, 3_200_000_000), 489_522_699),
    ((7, 5, 5, 2**62), 1_601_378_464_786_193_646),
    ((7, 5, 6, 2**63 - 1), 1_889_157_885_339_737_315),
]
WORDS = st.integers(0, 2**64 - 1)


def read_words(text):
    return [int(word, 16) for word in text.split()]


def join(low, high):
    return low + 2**32 * high


@cpu_kernel
def draw_below_cpu(key, items, slot, bounds, out):
    for i in prange(out.shape[0]):
        out[i] = draw_below(key, items[i], slot, bounds[i])


@gpu_kernel("u8 i8[] i8 i8[] i8[]")
def draw_below_gpu(key, items, slot, bounds, out):
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, out.shape[0], cuda.gridDim.x * THREADS):
        out[i] = draw_below(key, items[i], slot, bounds[i])


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_reference_gives_the_known_answers(counter, key, output):
    got = reference.philox(read_words(counter), read_words(key))

    assert got == read_words(output)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_draw_is_the_first_half_of_the_known_answers(counter, key, output):
    a, b, c, d = read_words(counter)
    first, second, *_ = read_words(output)

    got = draw(np.uint64(join(*read_words(key))), np.uint64(join(a, b)), np.uint64(join(c, d)))

    assert int(got) == join(first, second)


@pytest.mark.parametrize(("arguments", "bits"), DRAWS)
def test_draws_are_frozen(arguments, bits):
    got = [
        int(draw(*map(np.uint64, arguments))),
        derive_key(*arguments),
        reference.draw(*arguments),
    ]

    assert got == [bits] * 3


@pytest.mark.parametrize(("arguments", "number"), DRAWS_BELOW)
def test_draws_below_a_bound_are_frozen(arguments, number):
    got = [int(draw_below(*map(np.uint64, arguments))), reference.draw_below(*arguments)]

    assert got == [number] * 2


@given(key=WORDS, item=WORDS, slot=WORDS, bound=st.integers(1, 2**63 - 1))
def test_plain_python_matches_the_reference(key, item, slot, bound):
    expected = reference.draw(key, item, slot), reference.draw_below(key, item, slot, bound)

    got = draw(*map(np.uint64, (key, item, slot))), draw_below(*map(np.uint64, (key, item, slot, bound)))

    assert tuple(map(int, got)) == expected
    assert derive_key(key, item, slot) == expected[0]


def test_bounds_up_to_63_bits_are_exact(device):
    bounds = [1, 2, 3, 10, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 3_200_000_000, 2**62 + 12_345, 2**63 - 1]
    items = [0, 1, 2**31, 2**33, 2**62, -1, -(2**63), 5, 6, 7, 8, 9]
    key = 2**64 - 59
    expected = [reference.draw_below(key, item, 11, bound) for item, bound in zip(items, bounds, strict=True)]
    arrays = [torch.tensor(values, device=device) for values in (items, bounds)]
    out = torch.full_like(arrays[0], -7)

    if runs_on_gpu(out):
        run_gpu(draw_below_gpu, grid_for(len(items), out), key, arrays[0], 11, arrays[1], out)
    else:
        run_cpu(draw_below_cpu, np.uint64(key), arrays[0], 11, arrays[1], out)

    assert out.tolist() == expected
