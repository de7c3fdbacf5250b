"""Recordings on any device, for tests of replayed models."""

import pytest

from tests.nn.replays import record_anywhere


@pytest.fixture
def device(real_device, monkeypatch):
    record_anywhere(real_device, monkeypatch)
    return real_device
