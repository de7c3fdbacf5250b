"""A feature gives the rows of a file bit for bit, whatever part of them is in memory."""

import copy
import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pyg_direct import CSRTopo, DeviceConfig, Feature, save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError, IdError
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.disk import DiskTier
from tests.features.contract import DTYPES, bytes_of, make_rows
from tests.poison import poisoned_memory

CACHES = pytest.mark.parametrize(
    "caches", [{}, {"device_cache_size": "20%"}, {"host_cache_size": "30%"},
               {"device_cache_size": "10%", "host_cache_size": "50%"}, {"host_cache_size": "100%"},
               {"device_cache_size": "1G"}], ids=str)  # fmt: skip
IDS = [5, 0, 39, 5, 5, 17, 38, 1, 0]


def read(feature, ids, device):
    with poisoned_memory():
        return bytes_of(feature[torch.tensor(ids, device=device)])


@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.full
def test_rows_of_any_dtype_come_bit_for_bit(device, tmp_path, dtype, caches):
    rows = make_rows(dtype=dtype)
    expected = bytes_of(rows)[IDS]
    path = save_rows(tmp_path / "rows.safetensors", rows)

    feature = Feature(device=device, **caches).from_file(path)

    assert torch.equal(read(feature, IDS, device), expected)
    assert (feature.shape, feature.dtype) == ((40, 5), dtype)


@CACHES
@pytest.mark.parametrize("row", [(), (7,), (2, 3, 5), (0,)], ids=str)
def test_rows_of_any_shape_come_bit_for_bit(device, tmp_path, row, caches):
    rows = make_rows(row=row)
    feature = Feature(device=device, **caches).from_file(save_rows(tmp_path / "rows.npy", rows))
    ids = torch.randint(40, (300,)).tolist()

    assert torch.equal(read(feature, ids, device), bytes_of(rows)[ids])


@CACHES
def test_only_rows_that_are_in_no_memory_come_from_disk(device, tmp_path, caches):
    feature = Feature(device=device, hotness=torch.arange(40), **caches).from_file(
        save_rows(tmp_path / "rows.npy", make_rows())
    )
    sizes = [caches.get("host_cache_size", "0%")]
    sizes += [caches.get("device_cache_size", "0%")] if device.type == "cuda" else []
    in_memory = max(40 if size == "1G" else 40 * int(size[:-1]) // 100 for size in sizes)

    read(feature, list(range(40)), device)

    if in_memory == 40:
        assert (isinstance(feature.stored, SpilledRows), feature.placement == "mmap") == (False, False)
    else:
        assert (feature.stored.num_missed, feature.stored.num_read) == (40 - in_memory, 40)
        assert feature.placement == "mmap"


def test_the_hottest_rows_are_in_memory(device, tmp_path):
    topo = CSRTopo(torch.tensor([[7, 7, 7, 3, 3, 5], [0, 1, 2, 0, 1, 0]]), num_nodes=40)
    feature = Feature(device=device, csr_topo=topo, host_cache_size="60B")
    feature.from_file(save_rows(tmp_path / "rows.npy", make_rows()))

    read(feature, [3, 5, 7], device)

    assert feature.stored.num_missed == 0


@pytest.mark.parametrize("slicing", [lambda a: a, lambda a: a[10:50], lambda a: a[3:][4:30], lambda a: a[0]],
                         ids=["whole", "slice", "slice of a slice", "row"])  # fmt: skip
@pytest.mark.parametrize("kind", ["npy", "raw"])
def test_memory_maps_are_read_where_they_lie(device, tmp_path, slicing, kind):
    rows = make_rows(60)
    if kind == "npy":
        array = np.load(save_rows(tmp_path / "rows.npy", rows), mmap_mode="r")
    else:
        (tmp_path / "rows").write_bytes(bytes(16) + rows.numpy().tobytes())
        array = np.memmap(tmp_path / "rows", np.float32, "r", offset=16, shape=(60, 5))
    expected = bytes_of(slicing(rows))

    feature = Feature(device=device).from_mmap(slicing(array))

    assert torch.equal(read(feature, [1, 4, 0], device), expected[[1, 4, 0]])
    assert feature.placement == "mmap"


def test_arrays_that_are_no_maps_are_read_into_memory(device):
    rows = make_rows()

    feature = Feature(device=device).from_mmap(rows.numpy().copy())

    assert torch.equal(read(feature, IDS, device), bytes_of(rows)[IDS])
    assert feature.placement != "mmap"


@pytest.mark.parametrize("way", ["rows", "ids", "files"])
@pytest.mark.parametrize("num_hot", [0, 10, 40])
def test_parts_are_joined_as_in_quiver(device, tmp_path, way, num_hot):
    rows, order = make_rows(), torch.randperm(40)
    expected, array = rows[order], None
    parts = [order[:num_hot], order[num_hot:]]
    if way == "ids":
        array = rows.numpy()
    elif way == "rows":
        parts = [rows[part] for part in parts]
    else:
        parts = [str(save_rows(tmp_path / f"{n}.npy", rows[part])) for n, part in enumerate(parts)]
    feature = Feature(rank=0, device=device)

    feature.from_mmap(array, DeviceConfig(gpu_parts={0: parts[0]}, cpu_part=parts[1]))

    assert torch.equal(read(feature, IDS, device), bytes_of(expected)[IDS])
    assert feature.num_hot_rows == (num_hot if device.type == "cuda" else 0)
    feature.set_local_order(order)
    assert torch.equal(read(feature, IDS, device), bytes_of(rows)[IDS])


@pytest.mark.parametrize("cache", [0, "20%", "100%"])
def test_what_is_not_in_memory_comes_from_a_file(device, tmp_path, cache):
    rows = make_rows(90)
    kept = torch.randperm(90)[:40]
    disk_map = torch.full((90,), -1)
    disk_map[kept] = torch.arange(40)
    # Other contents on disk than in memory show the origin of rows.
    on_disk = rows.clone()
    on_disk[kept] = -7.0
    feature = Feature(device=device, device_cache_size=cache).from_cpu_tensor(rows[kept])

    feature.set_mmap_file(save_rows(tmp_path / "rows.npy", on_disk), disk_map)

    ids = torch.randint(90, (500,))
    assert torch.equal(read(feature, ids.tolist(), device), bytes_of(rows)[ids])
    assert torch.equal(bytes_of(feature.read_mmap(kept)), bytes_of(on_disk)[kept])
    assert feature.shape == (90, 5)


@CACHES
@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_ids_out_of_range_are_refused_and_the_feature_stays_usable(device, tmp_path, caches, bad):
    rows = make_rows()
    feature = Feature(device=device, **caches).from_file(save_rows(tmp_path / "rows.npy", rows))

    def read_and_wait():
        read(feature, [3, bad], device)
        feature.synchronize()

    with pytest.raises(IdError, match=r"must lie in \[0, 40\)"):
        read_and_wait()

    assert torch.equal(read(feature, [39], device), bytes_of(rows)[[39]])


def test_a_changed_file_is_not_read(device, tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    feature = Feature(device=device, host_cache_size="20%").from_file(path)
    os.utime(path, ns=(1, 1))

    with pytest.raises(FileError, match="changed while it was read"):
        read(feature, [39], device)


def test_a_file_that_is_refused_leaves_the_rows_so_far(device, tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    rows = make_rows(9)
    feature = Feature(device=device, host_cache_size="20%", hotness=torch.arange(9)).from_cpu_tensor(rows)

    with pytest.raises(ArgumentError, match="hotness must hold a score for each of the 40 rows, got 9"):
        feature.from_file(path)

    assert torch.equal(read(feature, [8, 0], device), bytes_of(rows)[[8, 0]])


def test_a_file_that_cannot_be_read_leaves_an_empty_feature(device, tmp_path, monkeypatch):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    feature = Feature(device=device, host_cache_size="20%").from_cpu_tensor(make_rows(9))
    monkeypatch.setattr(DiskTier, "read", Mock(side_effect=FileError("gone")))

    with pytest.raises(FileError, match="gone"):
        feature.from_file(path)

    with pytest.raises(ArgumentError, match="holds no rows yet"):
        feature[[0]]


@CACHES
def test_a_deep_copy_reads_the_same_file(device, tmp_path, caches):
    rows = make_rows()
    feature = Feature(device=device, **caches).from_file(save_rows(tmp_path / "rows.npy", rows))

    other = copy.deepcopy(feature)

    assert torch.equal(read(other, IDS, device), bytes_of(rows)[IDS])
    assert torch.equal(read(feature, IDS, device), bytes_of(rows)[IDS])


def test_filling_again_forgets_the_file(device, tmp_path):
    feature = Feature(device=device).from_file(save_rows(tmp_path / "rows.npy", make_rows()))
    feature.set_local_order(torch.arange(39, -1, -1))
    rows = make_rows(7)

    feature.from_cpu_tensor(rows)

    assert torch.equal(read(feature, [6, 0], device), bytes_of(rows)[[6, 0]])


@pytest.mark.parametrize(("act", "error", "words"), [
    (lambda f, p: f.set_mmap_file(p, torch.zeros(3, dtype=torch.int64)), ArgumentError, "each of the 40 rows"),
    (lambda f, p: f.set_mmap_file(p, torch.full((40,), 9)), IdError, "places below 9, got 9"),
    (lambda f, p: f.set_mmap_file(p, torch.zeros(40)), ArgumentTypeError, "disk_map must have dtype"),
    (lambda f, p: f.read_mmap(torch.tensor([1])), ArgumentError, "has no file"),
    (lambda f, p: f.set_local_order(torch.zeros(9, dtype=torch.int64)), ArgumentError, "each of 0 to 8 once"),
    (lambda f, p: f.set_local_order(torch.arange(8)), ArgumentError, "each of 0 to 8 once"),
    (lambda f, p: f.set_local_order(torch.arange(1, 10)), IdError, r"local_order must lie in \[0, 9\)"),
    (lambda f, p: f.from_mmap(None), ArgumentTypeError, "np_array must be an array"),
    (lambda f, p: f.from_mmap(None, {}), ArgumentTypeError, "device_config must be a DeviceConfig"),
    (lambda f, p: f.from_mmap(None, DeviceConfig({1: p}, p)), ArgumentError, "must have a part for GPU 0"),
    (lambda f, p: f.from_mmap(np.zeros(3), DeviceConfig([torch.zeros(2)], p)), ArgumentTypeError, "must hold ids"),
    (lambda f, p: f.from_mmap(None, DeviceConfig([torch.zeros(2)], p)), ArgumentError, "one shape and dtype"),
    (lambda f, p: f.from_mmap(None, DeviceConfig([7], p)), ArgumentTypeError, r"gpu_parts\[0\] must be a tensor"),
    (lambda f, p: f.from_cpu_tensor(torch.zeros(9, 7)).set_mmap_file(p, torch.arange(40) % 9), ArgumentError,
     r"path must hold rows \(7,\) of torch.float32, .*rows.npy holds"),
])  # fmt: skip
def test_what_makes_no_sense_is_named(device, tmp_path, act, error, words):
    path = save_rows(tmp_path / "rows.npy", make_rows())
    feature = Feature(device=device).from_cpu_tensor(make_rows(9))

    with pytest.raises(error, match=words):
        act(feature, path)


def test_rows_of_a_file_lie_over_no_rows_of_another(device, tmp_path):
    rows = make_rows()
    path = save_rows(tmp_path / "rows.npy", rows)
    feature = Feature(device=device).from_file(path)

    for act in (lambda: feature.set_mmap_file(path, torch.arange(40)), lambda: feature.gather(torch.arange(3), None)):
        with pytest.raises(ArgumentError, match=r"rows must be in memory .*, got rows of 'mmap'"):
            act()

    assert torch.equal(read(feature, IDS, device), bytes_of(rows)[IDS])


def test_a_pickle_is_refused(device, tmp_path):
    torch.save(make_rows(), tmp_path / "rows.pt")

    with pytest.raises(FileError, match="loading one could run code"):
        Feature(device=device).from_file(tmp_path / "rows.pt")


def test_rows_are_not_stored_in_another_dtype_than_the_file(device, tmp_path):
    path = save_rows(tmp_path / "rows.npy", make_rows())

    with pytest.raises(ArgumentError, match=r"store_dtype must be None or torch.float32"):
        Feature(device=device, store_dtype=torch.float16).from_file(path)
