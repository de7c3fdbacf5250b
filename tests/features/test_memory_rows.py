"""Rows are looked at before they take the place of others by what will be asked of them, and no more."""

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.features.memory_rows import check_placing


class OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)


def look_at(table, is_for_many):
    check_placing(table, OnGpu.device, table.dtype, "20%", hotness=torch.arange(40), csr_topo=None,
                  is_for_many=is_for_many)  # fmt: skip


def test_rows_that_lie_on_the_gpu_need_no_ranking_there():
    look_at(torch.rand(41, 5).as_subclass(OnGpu), False)

    for table, is_for_many in ((torch.rand(41, 5), False), (torch.rand(41, 5).as_subclass(OnGpu), True)):
        with pytest.raises(ArgumentError, match="hotness must hold a score for each of the 41 rows, got 40"):
            look_at(table, is_for_many)
