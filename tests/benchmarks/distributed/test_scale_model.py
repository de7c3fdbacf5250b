"""The model of more hosts: what it is made of, and that it meets what was measured where it was measured."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.distributed.exchange import describe_cut, measure_cut
from benchmarks.distributed.scale_model import (
    HOSTS,
    NETWORKS,
    Load,
    find_contention,
    model_scaling,
    predict_seconds,
)
from pyg_direct.bench.result_row import read_rows

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


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


def find_committed(name, case, counts, **more):
    """What a benchmark found, from the committed rows: batches of equal size, and eight of them to an exchange."""
    rows = {(row["case"], row["metric"]): row for row in read_rows(RESULTS / f"distributed_{name}.json")}
    shared = rows[f"{case}/1", "batch grouped, packed and joined as by several"]
    found = {1: {"seconds": shared["limit"] / 1e3, "shared_seconds": shared["p50"] / 1e3, "spread": 0.0}}
    for count in (1, *counts):
        edges, whole = (1e6 * rows[f"{case}/{count}", metric]["p50"] for metric in (
            "edges of all processes", "edges of all processes, graph in one memory"))  # fmt: skip
        found.setdefault(count, {}).update(edges=[edges], whole=[whole])
    for count in counts:
        row_bytes, other_bytes, empty, bandwidth = (rows[f"{case}/{count}", metric]["p50"] for metric in (
            "row bytes sent a batch", "ids and edges sent a batch", "exchange of nothing",
            "exchange of 4 MiB with each"))  # fmt: skip
        edges = found[1]["edges"][0] * found[1]["seconds"]
        found[count] |= {"seconds": count * edges / found[count]["edges"][0], "row_bytes": 1e3 * row_bytes,
                         "other_bytes": 1e3 * other_bytes, "empty": [empty / 1e6], "bandwidth": [1e9 * bandwidth],
                         "group": 8.0, **{key: values[count] for key, values in more.items()}}  # fmt: skip
    return found


def compare(found, **options):
    return [row.p50 for row in model_scaling(found, "case", **options) if row.unit == "x"]


def test_the_model_meets_the_rows_of_two_and_four_processes_on_two_cores():
    found = find_committed("cpu", "distributed/products x 0.02/cpu", (2, 4))

    ratios = compare(found, crowding=lambda count: max(1.0, count / 2),
                     contention=lambda count: find_contention(found, count))  # fmt: skip

    assert all(abs(ratio - 1) <= 0.2 for ratio in ratios), ratios


def test_the_model_takes_the_rates_of_captured_exchanges():
    found = {1: {"edges": [1e9], "seconds": 2e-4, "shared_seconds": 3e-4, "spread": 0.0},
             2: {"edges": [1e9], "seconds": 1e-3, "row_bytes": 5e7, "other_bytes": 0, "empty": [1.0],
                 "bandwidth": [1.0], "group": 8.0, "segment_seconds": [2e-5], "segment_rate": [1e11]}}  # fmt: skip

    # Rows, which travel beside the hops of the next batch, take longer than these: their ids and they.
    assert compare(found) == [pytest.approx((2 * 2e-5 + 5e7 / 1e11) / 1e-3)]
    # Hops take longer: work, six all-to-alls, and the bytes of nodes and edges.
    found[2] |= {"row_bytes": 1e6, "other_bytes": 2e6}
    assert compare(found) == [pytest.approx((3e-4 + 6 * 2e-5 + 2e6 / 1e11) / 1e-3)]


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
