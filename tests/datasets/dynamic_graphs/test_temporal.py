"""Dynamic graphs are read from files as their owners wrote them."""

import json

import numpy as np
import pytest
import torch

from pyg_direct.datasets.dynamic_graphs import load_temporal
from pyg_direct.errors import ArgumentError, ArgumentTypeError


def test_mapped_edges_and_lagged_values_are_read(tmp_path):
    values = np.random.default_rng(0).random((5, 2)).tolist()
    mapping = {"edge_index": {str(t): [[0, 1], [1, 1]] for t in range(5)},
               "edge_weight": {str(t): [1.0, t] for t in range(5)}}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"edge_mapping": mapping, "time_periods": 5, "y": values}))

    snapshots = load_temporal(tmp_path / "a.json", lags=3)

    assert len(snapshots) == 2
    scaled = (np.array(values) - np.mean(values, 0)) / np.std(values, 0)
    np.testing.assert_allclose(snapshots[1].x.numpy(), scaled[1:4].T, rtol=1e-5)
    np.testing.assert_allclose(snapshots[1].y.numpy(), scaled[4], rtol=1e-5)
    assert snapshots[1].edge_index.tolist() == [[0, 1], [1, 1]]
    assert snapshots[1].edge_attr.tolist() == [1, 1]


def test_numbered_snapshots_are_read(tmp_path):
    part = {"index": 0, "edges": [[0, 1], [2, 0]], "weights": [1, 2], "y": [1, 2, 3], "X": [[1, 2]] * 3}
    (tmp_path / "a.json").write_text(json.dumps({"0": part, "1": part, "time_periods": 2}))

    snapshots = load_temporal(tmp_path / "a.json")

    assert [s.edge_index.tolist() for s in snapshots] == [[[0, 2], [1, 0]]] * 2
    assert (snapshots[0].x.shape, snapshots[0].y.tolist()) == ((3, 2), [1, 2, 3])


def test_static_edges_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"edges": [[0, 1]], "node_ids": {}, "FX": [[1, 2], [2, 4], [4, 3]]}))

    (snapshot,) = load_temporal(tmp_path / "a.json", lags=2)

    assert (snapshot.edge_index.tolist(), snapshot.edge_attr, snapshot.x.shape) == ([[0], [1]], None, (2, 2))


def test_undirected_edges_are_given_both_ways(tmp_path):
    np.savez(tmp_path / "s.npz", ptr=[0, 2, 3], src=np.array([0, 1, 0], dtype=np.int16),
             dst=np.array([1, 2, 2], dtype=np.int16), num_nodes=3)  # fmt: skip

    (snapshot,) = load_temporal(tmp_path / "s.npz")

    assert snapshot.edge_index.tolist() == [[0, 1, 1, 2], [1, 2, 0, 1]]
    torch.testing.assert_close(snapshot.x[:, 0].expm1(), torch.tensor([1.0, 2, 1]))
    torch.testing.assert_close(snapshot.y.expm1(), torch.tensor([1.0, 0, 1]))


def test_papers_make_a_snapshot_a_year(tmp_path):
    # Paper 1 of 2001 cites 0 of 2000; 2 of 2003 cites both.
    np.savez(tmp_path / "g.npz", edge_index=np.array([[1, 2, 2], [0, 0, 1]], dtype=np.int32),
             node_year=np.array([2000, 2001, 2003], dtype=np.int16))  # fmt: skip

    first, second = load_temporal(tmp_path / "g.npz")

    assert [s.edge_index.tolist() for s in (first, second)] == [[[], []], [[1, 0], [0, 1]]]
    assert second.x.expm1().round().tolist() == [[2, 0, 1, 1], [2, 1, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(
        (first.y.expm1(), second.y.expm1()), (torch.tensor([1.0, 0, 0]), torch.tensor([1.0, 1, 0]))
    )


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")

    with pytest.raises(ArgumentError, match="a known form"):
        load_temporal(tmp_path / "a.json")
    with pytest.raises(ArgumentError, match="name a file"):
        load_temporal(tmp_path / "b.json")


LAGGED = {"edges": [[0, 1]], "FX": [[1, 2], [2, 4], [4, 3]]}
NUMBERED = {"edges": [[0, 1]], "weights": [1], "y": [1, 2], "X": [[1], [2]]}


@pytest.mark.parametrize("text", [
    "", "{", "3", "null", '{"edge_mapping": 3}', '{"FX": []}', '{"FX": [[1], [2]]}',
    json.dumps(LAGGED | {"edges": [[0, 2]]}), json.dumps(LAGGED | {"edges": [["a", 0]]}),
    json.dumps({"time_periods": 2, "0": NUMBERED}), json.dumps({"time_periods": 1, "0": {**NUMBERED, "X": None}}),
])  # fmt: skip
def test_damaged_json_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)

    with pytest.raises(ArgumentError, match=r"path must hold whole snapshots in a known form, got .*a.json, which"):
        load_temporal(tmp_path / "a.json", lags=1)


EDGES = {"ptr": [0, 2, 3], "src": [0, 1, 0], "dst": [1, 2, 2], "num_nodes": 3}


@pytest.mark.parametrize(("arrays", "message"), [
    ({"ptr": [0, 3]}, r"s.npz must hold ptr, src, dst, num_nodes, got no src, dst, num_nodes"),
    (EDGES | {"ptr": [0, 2, 9]}, r"got .*s.npz, which gives ValueError: ptr that does not ascend from 0 to 3"),
    (EDGES | {"num_nodes": 2}, r"s.npz, which gives"), (EDGES | {"src": [0.5, 1, 0]}, r"integers as src, got float64"),
    (EDGES | {"ptr": [0, 3]}, r"path must hold two snapshots at least"),
    ({"edge_index": [[0], [2]], "node_year": [2000, 2001]}, r"s.npz, which gives"),
    ({"edge_index": [[0], [1]], "node_year": [2000, 2000]}, r"path must hold two snapshots at least"),
])  # fmt: skip
def test_damaged_archives_are_named(tmp_path, arrays, message):
    np.savez(tmp_path / "s.npz", **arrays)

    with pytest.raises(ArgumentError, match=message):
        load_temporal(tmp_path / "s.npz")


def test_an_archive_that_is_none_is_named(tmp_path):
    (tmp_path / "s.npz").write_bytes(b"PK")

    with pytest.raises(ArgumentError, match=r"s.npz must be a whole NumPy archive"):
        load_temporal(tmp_path / "s.npz")


@pytest.mark.parametrize(("lags", "kind", "message"), [
    (0, ArgumentError, "lags must be at least 1, got 0"), ("2", ArgumentTypeError, "lags must be an integer, got '2'"),
    (3, ArgumentError, "lags must be fewer than the steps of the file, got 3 of 3 steps"),
])  # fmt: skip
def test_lags_that_leave_no_snapshot_are_refused(tmp_path, lags, kind, message):
    (tmp_path / "a.json").write_text(json.dumps(LAGGED))

    with pytest.raises(kind, match=message):
        load_temporal(tmp_path / "a.json", lags=lags)
