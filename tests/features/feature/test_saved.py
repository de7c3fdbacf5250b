"""Features in files: the rows are there when the process that saved them is not."""

import pickle
import subprocess
import sys

import pytest
import torch

from pyg_direct import CSRTopo, Feature, FeatureStore
from pyg_direct.errors import ArgumentError

IDS = torch.tensor([6, 0, 9, 9, 3])


def make_rows(dtype=torch.float32):
    return (torch.arange(30).view(10, 3) % 11).to(dtype)


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
@pytest.mark.parametrize(
    ("dtype", "store_dtype"),
    [(torch.float32, None), (torch.int64, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float8_e4m3fn)],
)
def test_a_saved_feature_has_its_rows(device, tmp_path, dtype, store_dtype, cache):
    made = Feature(device=device, device_cache_size=cache, store_dtype=store_dtype).from_cpu_tensor(make_rows(dtype))

    torch.save(made, tmp_path / "feature.pt")
    saved = torch.load(tmp_path / "feature.pt", weights_only=False)

    assert saved[IDS].tolist() == made[IDS].tolist()
    assert saved.dtype == dtype
    assert (saved.store_dtype, saved.device_cache_size) == (store_dtype, cache)


def test_a_saved_feature_is_read_by_another_process(tmp_path):
    torch.save(Feature(device="cpu").from_cpu_tensor(make_rows()), tmp_path / "feature.pt")
    program = (
        "import sys, torch; print(torch.load(sys.argv[1], weights_only=False)[torch.tensor([6, 0, 9, 9, 3])].tolist())"
    )

    got = subprocess.run([sys.executable, "-c", program, tmp_path / "feature.pt"], check=True, capture_output=True)

    assert got.stdout.decode().strip() == str(make_rows()[IDS].tolist())


def test_rows_may_be_updated_after_they_were_saved(device):
    made = Feature(device=device).from_cpu_tensor(make_rows())
    saved = pickle.loads(pickle.dumps(made))

    for feature, number in ((made, 7.0), (saved, 8.0)):
        feature.update_(torch.tensor([6]), torch.full((1, 3), number))

    assert made[IDS].tolist()[0] == [7.0] * 3
    assert saved[IDS].tolist()[0] == [8.0] * 3


def test_names_and_ranks_of_rows_are_saved(device):
    topo = CSRTopo(torch.tensor([[5, 5, 7], [0, 1, 2]]), num_nodes=10)
    made = Feature(device=device, device_cache_size="20%", csr_topo=topo).from_cpu_tensor(make_rows())
    made.set_local_order(torch.arange(9, -1, -1))

    saved = pickle.loads(pickle.dumps(made))

    assert saved[IDS].tolist() == make_rows().flip(0)[IDS].tolist()
    assert saved.hotness.argmax() == 5


def test_a_feature_that_came_from_another_process_is_saved_too(device):
    made = Feature(device=device, store_dtype=torch.float8_e4m3fn).from_cpu_tensor(make_rows())
    sent = Feature.lazy_from_ipc_handle(made.share_ipc())

    saved = pickle.loads(pickle.dumps(sent))

    assert saved[IDS].tolist() == made[IDS].tolist()


def test_a_part_of_a_table_is_saved_alone():
    made = Feature(device="cpu").from_cpu_tensor(torch.zeros(100_000, 3)[:10])

    assert len(pickle.dumps(made)) < 3000


def test_a_store_is_saved_with_its_tables():
    store = FeatureStore()
    store[None, "x", None] = Feature(device="cpu").from_cpu_tensor(make_rows())

    saved = pickle.loads(pickle.dumps(store))

    assert saved[None, "x", None][IDS].tolist() == make_rows()[IDS].tolist()


def test_rows_of_a_file_stay_there(tmp_path):
    (tmp_path / "rows.bin").write_bytes(make_rows().numpy().tobytes())
    made = Feature(device="cpu").from_file(tmp_path / "rows.bin", dtype=torch.float32, shape=(10, 3))

    with pytest.raises(ArgumentError, match="call from_file in each process"):
        pickle.dumps(made)
