"""Passes over places of sampled batches: rows come late only if nothing reads them before."""

from types import SimpleNamespace

import pytest
import torch

from pyg_direct.nn.replay.batch_passes import PaddedPasses


class _Graph:
    """Recorded forward pass in two parts: the first may read rows already."""

    parts = (None, None)

    def __init__(self, passes, reads_early):
        self._passes, self._reads_early = passes, reads_early

    def replay(self, between):
        rows, out = self._passes._places[0], self._passes._outs[0]
        early = rows.sum(0)
        between()
        out.copy_(early if self._reads_early else rows.sum(0))


@pytest.mark.parametrize("reads_early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_rows_are_copied_late_if_the_first_part_of_a_recording_reads_none(reads_early, dtype):
    passes, rows = PaddedPasses.__new__(PaddedPasses), torch.arange(12).view(6, 2).to(dtype)
    passes._places, passes._outs, passes._grads, passes._gradients, passes._flat = (
        [rows],
        [torch.zeros(2)],
        [],
        [],
        None,
    )
    passes._device, passes._model = torch.device("cpu"), lambda: torch.nn.Linear(2, 2)
    passes._graphs = [_Graph(passes, reads_early)]
    call = SimpleNamespace(roles=[("paper", False)])

    assert passes._reads_late(call) == (dtype.is_floating_point and not reads_early)
    assert rows.tolist() == torch.arange(12).view(6, 2).tolist()
