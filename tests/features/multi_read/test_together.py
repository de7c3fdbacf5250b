import pytest
import torch

from pyg_direct.errors import IdError
from pyg_direct.features.feature import Feature
from pyg_direct.features.multi_read import group_narrow

TABLES = {
    "y": torch.randint(9, (40,)),
    "train_mask": torch.rand(40) < 0.5,
    "val_mask": torch.rand(40) < 0.5,
    "test_mask": torch.rand(40) < 0.5,
    "weight": torch.rand(40),
    "time": torch.randint(9, (40, 1)),
    "wide": torch.rand(40, 9),
    "other": torch.rand(30),
}


def make_features(device="cuda", **options):
    return {name: Feature(device=device, **options).from_cpu_tensor(table) for name, table in TABLES.items()}


@pytest.mark.gpu
def test_short_rows_in_gpu_memory_are_read_together():
    features = make_features(device_cache_size="100%")
    ids = torch.randint(40, (99,), device="cuda")

    groups = group_narrow(features)

    assert [group.names for group in groups] == [["y", "train_mask", "val_mask", "test_mask"], ["weight", "time"]]
    for group in groups:
        rows = group.read(ids)
        assert all(torch.equal(rows[name].cpu(), TABLES[name][ids.cpu()]) for name in group.names)


@pytest.mark.gpu
def test_an_id_out_of_range_is_told_by_the_next_read():
    (group, _) = group_narrow(make_features(device_cache_size="100%"))

    group.read(torch.tensor([0, 40], device="cuda"))
    torch.cuda.synchronize()

    with pytest.raises(IdError, match="position 1"):
        group.read(torch.tensor([0], device="cuda"))


@pytest.mark.gpu
def test_rows_on_the_host_are_read_alone():
    assert group_narrow(make_features(device_cache_size="20%")) == []


def test_rows_on_a_cpu_are_read_alone():
    assert group_narrow(make_features("cpu")) == []
