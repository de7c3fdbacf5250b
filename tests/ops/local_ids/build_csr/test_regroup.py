import numpy as np
import pytest
import torch

from pyg_direct.ops.local_ids.build_csr import Piece, regroup


@pytest.mark.parametrize("seed", range(3))
def test_segments_go_to_their_places(device, seed):
    rng = np.random.default_rng(seed)
    pieces, sizes = [], [0, 0, 0]
    for number in range(7):
        # The last output gets no item under the first seed.
        counts, output = rng.integers(0, 5, rng.integers(0, 6)), number % (2 if seed == 0 else 3)
        order = rng.permutation(len(counts))
        places = np.zeros(len(counts), np.int64)
        places[order] = sizes[output] + np.cumsum(counts[order]) - counts[order]
        sizes[output] += int(counts.sum())
        pieces.append(Piece(torch.from_numpy(rng.integers(1, 1000, counts.sum())).to(device), counts, places, output))
    outputs = [torch.full((size,), -1, device=device) for size in sizes]

    regroup(pieces, outputs)

    for items, counts, places, output in pieces:
        for part, place in zip(items.split(counts.tolist()) if len(counts) else [], places.tolist(), strict=True):
            assert outputs[output][place : place + len(part)].tolist() == part.tolist()
    assert all((output >= 0).all() for output in outputs)


def test_nothing_goes_nowhere(device):
    none = torch.empty(0, dtype=torch.int64, device=device)

    regroup([Piece(none, np.zeros(2, np.int64), np.zeros(2, np.int64), 0)], (none, none, none))
    regroup([], (none, none, none))
