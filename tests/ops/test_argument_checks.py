"""An option that a class does not have is named, with the nearest that it has."""

import inspect
import warnings

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import (
    CSRTopo,
    DataListLoader,
    DataLoader,
    DenseDataLoader,
    Feature,
    GraphSageSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    PPRLoader,
    ShaDowKHopSampler,
    SubGraphLoader,
)
from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning
from pyg_direct.loader import NeighborSampler
from pyg_direct.ops.argument_checks import list_options

EDGES = torch.arange(20).repeat(2, 1)


def make_data():
    return Data(x=torch.rand(20, 3), edge_index=EDGES)


def make_typed():
    data = HeteroData()
    data["paper"].num_nodes, data["paper", "cites", "paper"].edge_index = 20, EDGES
    return data


LOADERS = {
    "NeighborLoader": lambda **options: NeighborLoader(make_data(), [2], device="cpu", **options),
    "SubGraphLoader": lambda **options: SubGraphLoader(make_data(), None, [2], device="cpu", **options),
    "LinkNeighborLoader": lambda **options: LinkNeighborLoader(make_data(), [2], device="cpu", **options),
    "HGTLoader": lambda **options: HGTLoader(make_typed(), [2], "paper", device="cpu", **options),
    "ShaDowKHopSampler": lambda **options: ShaDowKHopSampler(make_data(), 1, 2, device="cpu", **options),
    "PPRLoader": lambda **options: PPRLoader(make_data(), 2, device="cpu", **options),
    "DataLoader": lambda **options: DataLoader([make_data()] * 20, device="cpu", **options),
    "DenseDataLoader": lambda **options: DenseDataLoader([make_data()] * 20, device="cpu", **options),
    "DataListLoader": lambda **options: DataListLoader([make_data()] * 20, **options),
    "NeighborSampler": lambda **options: NeighborSampler(EDGES, [2], device="cpu", **options),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("given", "meant"), [("shufle", "shuffle"), ("batchsize", "batch_size"), ("sed", "seed")])
def test_a_loader_tells_the_option_that_was_meant(name, given, meant):
    with pytest.raises(ArgumentTypeError, match=rf"^{name} has no option {given}; did you mean .*\b{meant}\b.*\?"):
        LOADERS[name](**{given: 1})


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("given", ["with_edge", "as_pyg_v1", "edge_dir", "strategy"])
def test_a_loader_names_options_of_other_packages(name, given):
    with pytest.raises(TypeError, match=rf"^{name} has no option {given}; (did you mean|it has) "):
        LOADERS[name](**{given: 1})


@pytest.mark.parametrize(
    ("make", "name", "given", "meant"),
    [
        (NeighborLoader, "NeighborLoader", "num_neighbours", "num_neighbors"),
        (LinkNeighborLoader, "LinkNeighborLoader", "num_neighbours", "num_neighbors"),
        (HGTLoader, "HGTLoader", "num_sample", "num_samples"),
    ],
)
def test_a_misspelt_argument_that_is_needed_is_named(make, name, given, meant):
    with pytest.raises(ArgumentTypeError, match=rf"^{name} has no option {given}; did you mean {meant}\?"):
        make(make_typed(), **{given: [2]}, batch_size=4)


def test_an_argument_that_is_missing_is_named_by_python():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_neighbors'"):
        NeighborLoader(make_data(), batch_size=4)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "10"])
@pytest.mark.parametrize("name", ["NeighborLoader", "LinkNeighborLoader", "HGTLoader", "PPRLoader", "DataLoader"])
def test_a_batch_size_that_is_none_is_refused(name, size):
    with pytest.raises(ArgumentError, match=f"^batch_size must be an integer of at least 1, or None, got {size!r}$"):
        LOADERS[name](batch_size=size)


def test_a_mask_of_numbers_is_told_from_ids():
    with pytest.raises(
        ArgumentTypeError, match=r"got torch.float32: give its .long\(\), or its .bool\(\) if it is a mask"
    ):
        NeighborLoader(make_data(), [2], torch.ones(20), device="cpu")
    with pytest.raises(ArgumentTypeError, match=r"got torch.float32: give its .long\(\)$"):
        NeighborLoader(make_data(), [2], torch.ones(3), device="cpu")


def test_a_loader_made_again_of_its_attributes_warns_of_nothing():
    loader = LOADERS["NeighborLoader"](batch_size=4)
    data_set = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = LOADERS["NeighborLoader"](batch_size=4, **data_set)

    assert len(again) == len(loader)
    with pytest.warns(LoaderWarning, match="collate_fn=.*: not used, as the loader has its own"):
        LOADERS["NeighborLoader"](batch_size=4, dataset=None, collate_fn=list)


def test_options_that_are_handed_on_are_meant_too():
    with pytest.raises(ArgumentTypeError, match=r"SubGraphLoader has no option feature_cach; did you mean feature_cac"):
        LOADERS["SubGraphLoader"](feature_cach="20%")
    assert "node_sampler" not in list_options(NeighborLoader)
    assert {"input_nodes", "feature_cache", "seed"} <= set(list_options(SubGraphLoader))


def test_a_class_of_the_program_has_its_own_options():
    class OwnLoader(NeighborLoader):
        def __init__(self, data, own_fanout=2, **kwargs):
            super().__init__(data, [own_fanout], **kwargs)

    with pytest.raises(ArgumentTypeError, match=r"^OwnLoader has no option own_fanot; did you mean own_fanout\?"):
        OwnLoader(make_data(), own_fanot=3, device="cpu")
    assert len(OwnLoader(make_data(), own_fanout=3, device="cpu", batch_size=5)) == 4


@pytest.mark.parametrize("name", LOADERS)
def test_options_of_torch_are_taken(name):
    options = {"batch_size": 4, "drop_last": True, "shuffle": True, "generator": torch.Generator()}

    assert len(LOADERS[name](**options)) == 5


def test_a_feature_and_a_sampler_tell_what_was_meant():
    with pytest.raises(ArgumentTypeError, match=r"^Feature has no option cache_size; did you mean .*device_cache_size"):
        Feature(cache_size="20%", device="cpu")
    with pytest.raises(ArgumentTypeError, match=r"^GraphSageSampler has no option num_neighbors; it has csr_topo, siz"):
        GraphSageSampler(CSRTopo(EDGES), num_neighbors=[2])


def test_signatures_stay_as_they_are():
    assert list(inspect.signature(Feature).parameters)[:3] == ["rank", "device_list", "device_cache_size"]
    assert inspect.signature(GraphSageSampler).parameters["mode"].default == "auto"
