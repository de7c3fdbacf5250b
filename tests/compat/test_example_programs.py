"""Programs over small graphs find generated data sets, and their lines are compared."""

import torch
from torch_geometric.datasets import TUDataset

from tests.compat.example_programs import Run, is_apart, tabulate
from tests.compat.generated_data import MAKERS, draw, generate


def test_a_data_set_is_generated_instead_of_downloaded(tmp_path, monkeypatch):
    for kind in MAKERS:
        # Undone after the test.
        for name in ("download", "process"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    generate()
    state = torch.get_rng_state()

    dataset = TUDataset(str(tmp_path), "MUTAG")

    assert (len(dataset), dataset.num_features, dataset.num_classes) == (188, 3, 2)
    assert all(graph.validate() and not graph.is_directed() for graph in dataset)
    assert torch.equal(torch.get_rng_state(), state)


def test_graphs_are_drawn_again_alike():
    first, second = draw(5, 4, 9), draw(5, 4, 9)

    assert all(torch.equal(one.edge_index, other.edge_index) for one, other in zip(first, second, strict=True))
    assert {len(one.kinds) for one in draw(40, 4, 6)} == {4, 5, 6}


def test_lines_are_compared_and_rows_of_other_programs_stay():
    plain, ours = [Run(["a 1", "b 2"], 0.5, "")], [Run(["a 1", "b 3"], 0.25, "DataLoader (1)")]
    before = tabulate({"kept.py": {"PyG": plain, "pyg_direct": plain}}, commit="1")

    rows = tabulate({"new.py": {"PyG": plain, "pyg_direct": ours}}, before, "2").splitlines()

    assert rows[2:] == ["| kept.py | 2 | 2 | b 2 | the same | 0.50 | 0.50 |  | 1 |",
                        "| new.py | 2 | 1 | b 2 | b 3 | 0.50 | 0.25 | DataLoader (1) | 2 |"]  # fmt: skip
    assert tabulate({}, "\n".join(rows)).splitlines() == rows
    assert is_apart({"PyG": plain, "pyg_direct": ours})


def test_drawn_batches_are_compared_by_their_mean_scores():
    plain = [Run([f"Epoch 1, Test: {score}"]) for score in (0.70, 0.72, 0.74)]
    near = [Run([f"Epoch 1, Test: {score}"]) for score in (0.72, 0.74, 0.76)]
    far = [Run([f"Epoch 1, Test: {score}"]) for score in (0.90, 0.92, 0.94)]

    assert not is_apart({"PyG": plain, "pyg_direct": near})
    assert is_apart({"PyG": plain, "pyg_direct": far})
    row = tabulate({"new.py": {"PyG": plain, "pyg_direct": far}}).splitlines()[-1]
    assert row == "| new.py | 1 | - | 0.72 ± 0.012 | 0.92 ± 0.012 | - | - |  | unknown |"
