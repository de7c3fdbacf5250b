import pytest
import torch


@pytest.fixture(scope="session", params=[pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def real_device(request):
    """CPU and GPU without the simulator, where a batch takes a second."""
    return torch.device(request.param)
