"""What a program made under PyG's name is saved as PyG's, and loads where the package is not; copies stay ours."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch_geometric.loader as pyg_loader
import torch_geometric.nn as pyg_nn
from torch_geometric.data import Data

import pyg_direct

EDGES = torch.randint(20, (2, 90), generator=torch.Generator().manual_seed(1))
TYPED = {("a", "to", "b"): EDGES % 7, ("b", "back", "a"): EDGES % 7}
MAKE = {
    "Node2Vec": lambda rooms: rooms[0].Node2Vec(EDGES, 4, 6, 3),
    "MetaPath2Vec": lambda rooms: rooms[0].MetaPath2Vec(TYPED, 4, list(TYPED), 5, 3),
    "ClusterData": lambda rooms: rooms[1].ClusterData(Data(x=torch.rand(20, 2), edge_index=EDGES), 3, log=False),
}
PYG, OURS = (pyg_nn, pyg_loader), (pyg_direct, pyg_direct)
names = pytest.mark.parametrize("name", MAKE)


@pytest.fixture
def installed():
    pyg_direct.install(device="cpu", seed=3)
    yield
    pyg_direct.uninstall()


def list_batches(made):
    if isinstance(made, pyg_loader.ClusterData):
        loader = pyg_direct.ClusterLoader(made, batch_size=2, device="cpu")
        return [[batch.x.tolist(), batch.edge_index.tolist()] for batch in loader]
    return [[walks.tolist() for walks in batch] for batch in made.loader(batch_size=3)]


@names
@pytest.mark.parametrize("protocol", [0, pickle.DEFAULT_PROTOCOL])
def test_a_file_names_nothing_of_ours(installed, name, protocol):
    made = MAKE[name](PYG)
    list_batches(made)

    sent = pickle.dumps({"hyper_parameters": copy.deepcopy(made), "model": made}, protocol)

    assert type(made) is getattr(pyg_direct, name)
    assert b"pyg_direct" not in sent


@pytest.mark.full
def test_files_load_where_the_package_is_not(installed, tmp_path):
    made = [MAKE[name](PYG) for name in MAKE]
    expected = [made[0](), made[1]("a"), made[2][1].edge_index]
    torch.save((made, expected), tmp_path / "saved.pt")
    program = (
        "import sys; sys.modules['pyg_direct'] = None; import torch; (first, second, clusters), expected = "
        "torch.load('saved.pt', weights_only=False); got = first(), second('a'), clusters[1].edge_index; "
        "assert all(map(torch.equal, got, expected)); assert len(next(iter(second.loader(batch_size=3)))) == 2"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr


@names
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_copies_stay_ours(installed, name, way):
    made = MAKE[name](PYG)

    copied = way(made)

    assert type(copied) is type(made)
    assert list_batches(copied) == list_batches(made)
    assert b"pyg_direct" not in pickle.dumps(copied)


@names
def test_what_is_loaded_while_installed_goes_on_as_ours(installed, name):
    made = MAKE[name](PYG)

    loaded = pickle.loads(pickle.dumps(made))

    assert list_batches(loaded) == list_batches(made)
    assert b"pyg_direct" not in pickle.dumps(loaded)


@names
def test_what_a_program_made_of_ours_stays_ours(name):
    made = MAKE[name](OURS)

    loaded = pickle.loads(pickle.dumps(made))

    assert type(loaded) is type(made) is getattr(pyg_direct, name)
