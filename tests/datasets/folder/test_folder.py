"""Graphs read from a folder that the test writes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_direct.datasets import load_folder
from pyg_direct.errors import ArgumentError, ArgumentTypeError

GRAPH: dict[str, Any] = {
    # 0 -> 1 twice, 1 -> 0, a self loop at 2, 3 -> 1; node 4 has no edges
    "edge_index": np.array([[0, 0, 1, 2, 3], [1, 1, 0, 2, 1]], dtype=np.int32),
    "y": np.array([0, 2, 1, 2, -1], dtype=np.int16),
    "train": np.array([0, 1], dtype=np.int32),
    "valid": np.array([2], dtype=np.int32),
    "test": np.array([3, 4], dtype=np.int32),
}
FEATURES: dict[str, Any] = {
    "q": np.arange(-5, 5, dtype=np.int8).reshape(5, 2),
    "scale": np.array([0.5, 2.0], dtype=np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder "tiny" with five nodes, their features and a file that holds neither."""
    path = tmp_path / "tiny"
    path.mkdir()
    np.savez(path / "graph.npz", **GRAPH)
    np.savez(path / "x_int8.npz", **FEATURES)
    np.savez(path / "other.npz", q=np.zeros(3))
    return path


def test_edges_get_their_reverse_and_are_held_once(folder: Path) -> None:
    graph = load_folder(folder)

    assert graph.edge_index.tolist() == [[0, 1, 1, 2, 3], [1, 0, 3, 2, 1]]
    assert graph.edge_index.dtype == torch.int64


def test_edges_come_as_stored_when_asked(folder: Path) -> None:
    graph = load_folder(folder, undirected=False)

    assert graph.edge_index.tolist() == GRAPH["edge_index"].tolist()


def test_features_are_counts_times_scale(folder: Path) -> None:
    graph = load_folder(folder)

    expected = FEATURES["q"].astype(np.float32) * FEATURES["scale"]
    assert graph.x.dtype == torch.float32
    assert graph.x.tolist() == expected.tolist()
    assert load_folder(folder, dtype=torch.half).x.tolist() == expected.tolist()


def test_classes_split_and_name_are_read(folder: Path) -> None:
    graph = load_folder(str(folder))

    assert (graph.name, graph.num_nodes, graph.num_classes) == ("tiny", 5, 3)
    assert graph.y.tolist() == [0, 2, 1, 2, -1]
    split = graph.train_idx, graph.val_idx, graph.test_idx
    assert [part.tolist() for part in split] == [[0, 1], [2], [3, 4]]
    assert {tensor.dtype for tensor in (graph.y, *split)} == {torch.int64}


def test_data_has_the_split_as_masks(folder: Path) -> None:
    data = load_folder(folder).to_data()

    assert data.validate()
    assert data.num_nodes == 5
    assert data.train_mask.tolist() == [True, True, False, False, False]


def test_folder_without_features_gives_none(folder: Path) -> None:
    (folder / "x_int8.npz").unlink()

    graph = load_folder(folder)

    assert graph.x is None
    assert graph.to_data().num_nodes == 5


def test_features_are_chosen_by_name(folder: Path) -> None:
    np.savez(folder / "x_other.npz", q=np.ones((5, 1), dtype=np.int8), scale=np.ones(1, dtype=np.float32))

    graph = load_folder(folder, features="x_other.npz")

    assert graph.x.tolist() == [[1.0]] * 5
    with pytest.raises(ArgumentError, match=r"features must say which file to read, got None with x_int8"):
        load_folder(folder)


def test_the_one_folder_in_a_folder_that_holds_a_graph_is_read(folder: Path) -> None:
    (folder.parent / "empty").mkdir()

    graph = load_folder(folder.parent)

    assert graph.name == "tiny"
    assert torch.equal(graph.x, load_folder(folder).x)


def test_several_folders_with_a_graph_are_named(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    np.savez(folder.parent / "other" / "graph.npz", **GRAPH)

    with pytest.raises(ArgumentError, match=r"path must name one of the folders that hold graph.npz, .*other, tiny$"):
        load_folder(folder.parent)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edge_index": np.array([[0], [5]])}, r"edge_index must hold ids in \[0, 5\), got 0 to 5"),
        ({"edge_index": np.array([0, 1])}, r"edge_index must be \[2, E\], got \[2\]"),
        ({"y": np.zeros((5, 1), dtype=int)}, r"y must be \[N\], got \[5, 1\]"),
        ({"valid": np.array([-1])}, r"valid must hold ids in \[0, 5\), got -1 to -1"),
        ({"valid": np.array([[1]])}, r"valid must be a list of ids, got the shape \[1, 1\]"),
        # As numbers these would be the nodes 1 and 0.
        ({"train": np.array([True, False])}, r"graph.npz must hold integers as train, got bool"),
        ({"y": np.array([0, 1, np.nan, 0, 0])}, r"graph.npz must hold integers as y, got float64"),
        ({"y": np.array([0, 1, -2, 0, 0])}, r"y must hold classes, or -1 where one is unknown, got -2"),
        ({"edge_index": np.array([["a"], ["b"]])}, r"graph.npz must hold integers as edge_index, got <U1"),
        ({"edge_index": np.array([[None], [1]])}, r"graph.npz must be a whole NumPy archive"),
        ({"y": np.zeros(6, dtype=int)}, r"x_int8.npz must hold q \[6, F\] and scale \[F\], got \[5, 2\] and \[2\]"),
    ],
)
def test_array_outside_its_rule_is_named(folder: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(folder / "graph.npz", **(GRAPH | arrays))

    with pytest.raises(ArgumentError, match=message):
        load_folder(folder)


def test_missing_array_is_named(folder: Path) -> None:
    np.savez(folder / "graph.npz", **{name: array for name, array in GRAPH.items() if name != "y"})

    with pytest.raises(ArgumentError, match=r"graph.npz must hold edge_index, y, .*, test, got no y"):
        load_folder(folder)


def test_missing_files_are_named(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path must be a folder that holds graph.npz, got .*nowhere"):
        load_folder(folder / "nowhere")
    with pytest.raises(ArgumentError, match=r"features must name a file of the folder, got 'y.npz'"):
        load_folder(folder, features="y.npz")
    with pytest.raises(ArgumentTypeError, match=r"dtype must be a torch.dtype, got 'half'"):
        load_folder(folder, dtype="half")


@pytest.mark.parametrize("name", ["graph.npz", "x_int8.npz"])
@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: b"text", lambda whole: whole[: len(whole) // 2],
                                    lambda whole: whole[:60] + bytes(8) + whole[68:]])  # fmt: skip
def test_damaged_archive_is_named(folder: Path, name: str, damage: Any) -> None:
    (folder / name).write_bytes(damage((folder / name).read_bytes()))

    with pytest.raises(ArgumentError, match=rf"{name} must be a whole NumPy archive \(.npz\) of numbers, got .*says: "):
        load_folder(folder)


def test_single_array_is_no_archive(folder: Path) -> None:
    np.save(folder / "x.npy", np.zeros((5, 2)))

    with pytest.raises(ArgumentError, match=r"x.npy must be a NumPy archive \(.npz\), got a single array"):
        load_folder(folder, features="x.npy")


def test_features_are_real_numbers(folder: Path) -> None:
    np.savez(folder / "x_int8.npz", q=FEATURES["q"].astype(">i2"), scale=FEATURES["scale"])
    assert load_folder(folder).x[0].tolist() == [-2.5, -8.0]
    np.savez(folder / "x_int8.npz", q=FEATURES["q"].astype(complex), scale=FEATURES["scale"])

    with pytest.raises(ArgumentError, match=r"x_int8.npz must hold real numbers as q, got complex128"):
        load_folder(folder)


def test_split_without_nodes_may_be_of_any_dtype(folder: Path) -> None:
    np.savez(folder / "graph.npz", **(GRAPH | {"valid": np.array([])}))

    assert load_folder(folder).val_idx.tolist() == []
