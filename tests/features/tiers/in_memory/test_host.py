"""Rows in host memory, for the CPU and for a GPU that reads them over its link."""

import pytest

from pyg_direct.errors import ForkedProcessError
from pyg_direct.features.tiers.in_memory import HostTier
from pyg_direct.runtime.cuda.memory import move
from tests.features.contract import TierContract, make_rows


class TestHostTierOnCpu(TierContract):
    """Rows that the CPU reads."""

    @pytest.fixture
    def tier_of(self):
        return HostTier


@pytest.mark.gpu
class TestHostTier(TierContract):
    """Rows that a GPU reads."""

    @pytest.fixture(params=["unified", "pinned"])
    def tier_of(self, request):
        def make(rows):
            block = move(rows, request.param, "cuda")
            return HostTier(block.view_on_gpu(rows.dtype, rows.shape), block, max_blocks=16)

        return make

    def test_rows_are_refused_in_a_forked_child(self, tier_of, monkeypatch):
        tier = tier_of(make_rows())
        monkeypatch.setattr(tier.block, "_process", -1)

        with pytest.raises(ForkedProcessError, match="spawn"):
            self.read(tier, [0])
