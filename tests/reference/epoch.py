"""Positions of the input nodes in each batch of an epoch, for each of several processes."""

from __future__ import annotations

from tests.reference.draw import permute, shuffle_key


def list_batches(count: int, batch_size: int, seed: int, epoch: int, shuffle: bool = False, drop_last: bool = False,
                 rank: int = 0, ranks: int = 1, uneven: str = "pad") -> list[tuple[int, list[int]]]:  # fmt: skip
    """(number, positions) of the batches of a process; a batch that is repeated to pad has its own number."""
    order = permute(count, shuffle_key(seed, epoch)) if shuffle else list(range(count))
    batches = [order[begin : begin + batch_size] for begin in range(0, count, batch_size)]
    if drop_last and batches and len(batches[-1]) < batch_size:
        batches.pop()
    numbers = list(range(len(batches)))
    while len(numbers) % ranks and uneven != "keep":
        if uneven == "pad":
            numbers.append(len(numbers))
        else:
            numbers.pop()
    return [(number, batches[number % len(batches)]) for number in numbers if number % ranks == rank]
