"""The model of more hosts: what it is made of, and that it meets what was measured where it was measured."""

import math

import pytest
import torch

from benchmarks.distributed.exchange import describe_cut, measure_cut
from benchmarks.distributed.scale_model import HOSTS, NETWORKS, Load, model_scaling, predict_seconds


def test_one_host_takes_the_time_of_its_own_work():
    assert predict_seconds(Load(0.5, 1e9, 1e6), 1, 0.0, 1.0, 1.0) == 0.5


def test_hosts_wait_for_the_largest_batch():
    # Of e**2 batches the largest is two standard deviations above the mean.
    assert predict_seconds(Load(1.0, 0.0, 1e6, 0.1), round(math.e**2), 0.0, 0.0, 1.0) == pytest.approx(1.2, rel=0.02)


def test_messages_and_bytes_add_up():
    # 17 messages to each of 3 others, and half of 8 bytes over a link of 2 bytes a second.
    assert predict_seconds(Load(1.0, 8.0, 1e6), 4, 0.5, 0.1, 2.0) == pytest.approx(1.0 + 17 * 3 * 0.1 + 2.0)
    assert predict_seconds(Load(1.0, 8.0, 1e6, group=2), 4, 0.5, 0.1, 2.0) == pytest.approx(1.0 + 17 * 3 * 0.05 + 2.0)


def test_the_work_of_several_is_that_of_one_who_answers_itself():
    load = Load(1.0, 0.0, 1e6, shared_seconds=1.5)

    assert [predict_seconds(load, hosts, 0.5, 0.0, 1.0) for hosts in (1, 2)] == [1.0, 1.5]


def test_parts_of_a_ring_have_few_nodes_of_others():
    nodes = torch.arange(1200)

    cut = measure_cut(torch.stack([nodes, (nodes + 1) % 1200]), 1200, [2, 4])

    # Parts of 300 nodes have no seeds for a batch of 512.
    assert list(cut) == [2]
    assert 0 < cut[2] < 0.02
    assert [row.p50 for row in describe_cut(cut, "ring")] == [50.0, 100 * cut[2]]


def test_rows_of_the_model():
    found = {1: {"edges": [1e6], "seconds": 0.1, "spread": 0.0},
             2: {"edges": [1.6e6], "seconds": 0.125, "row_bytes": 1e6, "other_bytes": 1e5, "empty": [1e-4],
                 "bandwidth": [1e9]}}  # fmt: skip

    rows = list(model_scaling(found, "case", cut={2: 0.25}))

    compared = next(row for row in rows if row.unit == "x")
    assert compared.p50 == pytest.approx((0.1 + 17 * 0.5e-4 + 1.1e6 / 1e9) / 0.125)
    shared = next(row for row in model_scaling(found, "case", crowding=lambda count: count) if row.unit == "x")
    assert shared.p50 == pytest.approx(compared.p50 + 0.1 / 0.125)
    assert shared.note == f"{compared.note}; 2 processes to a core"
    curves = [row for row in rows if row.curve]
    assert len(curves) == len(NETWORKS) * len(HOSTS) + 3
    by_metis = next(row.p50 for row in curves if "METIS" in row.metric)
    by_hash = next(row.p50 for row in curves if row.metric == "predicted, 100 Gb/s, parts by hash" and row.at == 2)
    assert by_hash < by_metis < 2e-3
    for network in NETWORKS:
        line = [row.p50 for row in curves if row.metric == f"predicted, {network.name}, parts by hash"]
        assert line[0] == pytest.approx(1e-3)
        assert line == sorted(line)
