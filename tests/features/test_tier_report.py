"""A feature reports the rows that each of its tiers holds and has served."""

import sys

import pytest
import torch

from pyg_direct import Feature, save_rows
from pyg_direct.errors import ArgumentError
from tests.features.contract import make_rows

IDS = [5, 0, 39, 5, 5, 17, 38, 1, 0]


def tiers_of(report):
    return [tier[:3] for tier in report.tiers]


@pytest.mark.gpu
@pytest.mark.parametrize("read", ["read", "__getitem__"])
def test_hot_and_cold_rows_are_told_apart(read):
    feature = Feature(device_cache_size="20%").from_cpu_tensor(make_rows())
    feature.count_served()

    for _ in range(3):
        getattr(feature, read)(torch.tensor(IDS, device="cuda"))

    assert tiers_of(feature.report()) == [("GPU memory", 8, 18), ("host memory (unified)", 32, 9)]
    assert feature.hit_rate == 18 / 27


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "name"), [("100%", "GPU memory"), (0, "host memory (unified)")])
def test_one_tier_serves_all(cache, name):
    feature = Feature(device_cache_size=cache).from_cpu_tensor(make_rows())
    feature.count_served()

    feature[IDS]

    assert tiers_of(feature.report()) == [(name, 40, 9)]
    assert feature.hit_rate == (cache == "100%")


@pytest.mark.gpu
def test_three_tiers(tmp_path):
    feature = Feature(device_cache_size="10%", host_cache_size="50%").from_file(
        save_rows(tmp_path / "x.npy", make_rows())
    )
    feature.count_served()

    feature[torch.tensor(IDS, device="cuda")]

    assert tiers_of(feature.report()) == [("GPU memory", 4, 3), ("host memory (unified)", 16, 4), ("file", 20, 2)]
    assert feature.hit_rate == 3 / 9


def test_rows_of_a_file_and_of_host_memory(tmp_path):
    feature = Feature(device="cpu", host_cache_size="20%").from_file(save_rows(tmp_path / "x.npy", make_rows()))
    feature.count_served()

    feature[IDS]

    assert tiers_of(feature.report()) == [("host memory (cpu)", 8, 6), ("file", 32, 3)]
    feature.count_served()
    assert feature.report().num_read == 0


def test_the_table_is_printed(capsys):
    feature = Feature(device="cpu").from_cpu_tensor(make_rows())
    feature.report()
    feature.count_served()
    feature[IDS]

    feature.report()

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["host", "memory", "(cpu)", "40", "800", "B", "not", "counted"]
    assert lines[2] == "reads were not counted: call count_served() before them"
    assert lines[4].split() == ["host", "memory", "(cpu)", "40", "800", "B", "9", "100.0%", "180", "B"]


def test_a_picture_is_drawn(tmp_path):
    feature = Feature(device="cpu", host_cache_size="20%").from_file(save_rows(tmp_path / "x.npy", make_rows()))
    feature.count_served()
    feature[IDS]

    feature.report(tmp_path / "tiers.png")

    assert (tmp_path / "tiers.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    feature = Feature(device="cpu").from_cpu_tensor(make_rows())

    with pytest.raises(ModuleNotFoundError, match=r'needs the package matplotlib: pip install "\.\[bench\]"'):
        feature.report(tmp_path / "tiers.png")


def test_what_was_not_counted_has_no_rate():
    feature = Feature(device="cpu").from_cpu_tensor(make_rows())

    with pytest.raises(ArgumentError, match="call count_served first"):
        feature.hit_rate  # noqa: B018
    feature.count_served()
    feature.count_served(False)
    with pytest.raises(ArgumentError, match="call count_served first"):
        feature.hit_rate  # noqa: B018


def test_an_empty_feature_has_nothing_to_tell():
    with pytest.raises(ArgumentError, match="holds no rows yet"):
        Feature(device="cpu").report()
