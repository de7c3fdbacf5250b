"""Rows are looked at before they take the place of others by what will be asked of them, and no more."""

from types import SimpleNamespace

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import ReplacedRows


class OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)


def look_at(table, is_for_many):
    feature = SimpleNamespace(
        device=OnGpu.device, device_cache_size="20%", hotness=torch.arange(40), csr_topo=None, store_dtype=None,
        _shape=torch.Size([40, 5]), _check_count=lambda num_rows: None, _is_for_many=lambda: is_for_many)  # fmt: skip
    ReplacedRows._check_rows(feature, table)


def test_rows_that_lie_on_the_gpu_need_no_ranking_there():
    look_at(torch.rand(41, 5).as_subclass(OnGpu), False)

    for table, is_for_many in ((torch.rand(41, 5), False), (torch.rand(41, 5).as_subclass(OnGpu), True)):
        with pytest.raises(ArgumentError, match="hotness must hold a score for each of the 41 rows, got 40"):
            look_at(table, is_for_many)
