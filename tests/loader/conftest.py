"""GPU memory that tests of loaders have little of."""

import gc

import pytest
import torch


@pytest.fixture
def little_memory():
    """Leaves torch so many bytes more than it holds now."""

    def leave(num_bytes):
        # What is garbage would be more than was left.
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)
