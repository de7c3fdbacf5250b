"""Rows in the memory of the device itself."""

import pytest

from pyg_direct.features.tiers.in_memory import DeviceTier
from tests.features.contract import TierContract


class TestDeviceTier(TierContract):
    """Rows that no link is crossed for."""

    @pytest.fixture
    def tier_of(self, device):
        return lambda rows: DeviceTier(rows.to(device))
