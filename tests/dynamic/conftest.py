"""Numbers that recurrent layers do not round."""

import pytest
import torch


@pytest.fixture
def full_precision(monkeypatch):
    """Recurrent layers of cuDNN would round their inputs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
