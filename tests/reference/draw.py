"""Draws in Python integers: Philox4x32-10 (Salmon et al., SC 2011, section 4.3) and numbers made from its output."""

from __future__ import annotations

WORD = 2**32
# Purposes of a draw, and the epochs that stand for draws outside any epoch.
NEIGHBORS, SHUFFLE = 1, 2
DIRECT_CALLS, SHUFFLES = 2**63, 2**63 + 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Four 32-bit words of output for four 32-bit words of counter and two of key."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = second // WORD ^ b ^ left, second % WORD, first // WORD ^ d ^ right, first % WORD
        left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
    return [a, b, c, d]


def draw(key: int, item: int, slot: int) -> int:
    """64 bits: the first two words of output for the 64-bit integers (item, slot) as counter, low words first."""
    item, slot, key = item % 2**64, slot % 2**64, key % 2**64
    words = philox([item % WORD, item // WORD, slot % WORD, slot // WORD], [key % WORD, key // WORD])
    return words[0] + WORD * words[1]


def draw_below(key: int, item: int, slot: int, bound: int) -> int:
    """An integer in [0, bound): the high 64 bits of the 128-bit product."""
    return draw(key, item, slot) * bound // 2**64


def batch_key(seed: int, epoch: int, number: int) -> int:
    """Key of batch `number` of an epoch."""
    return draw(seed, epoch, number)


def call_key(seed: int, number: int) -> int:
    """Key of call `number` of a sampler outside any epoch."""
    return draw(seed, DIRECT_CALLS, number)


def shuffle_key(seed: int, epoch: int) -> int:
    """Key of the order of an epoch."""
    return draw(seed, SHUFFLES, epoch)


def hop_key(key: int, hop: int) -> int:
    """Key of the neighbors drawn in hop `hop` of a batch."""
    return draw(key, hop, NEIGHBORS)


def permute(count: int, key: int) -> list[int]:
    """0 .. count - 1 in the order of their draws, these taken as signed integers."""

    def signed(bits: int) -> int:
        return bits - 2**64 if bits >= 2**63 else bits

    return sorted(range(count), key=lambda item: signed(draw(key, item, SHUFFLE)))
