"""Options: those of later, those that only workers need, and bad ones."""

import warnings

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, LoaderWarning
from pyg_direct.ops import run_kernel
from tests.batches import assert_equal_batches, assert_equal_epochs, make_data

WORKER_OPTIONS = {"num_workers": 4, "persistent_workers": True, "prefetch_factor": 4, "pin_memory": True,
                  "worker_init_fn": print, "timeout": 30}  # fmt: skip


@pytest.mark.parametrize("num_neighbors", [NumNeighbors([2, 1]), np.array([2, 1]), [np.int64(2), 1]], ids=repr)
def test_fanouts_may_come_as_pyg_and_numpy_keep_them(num_neighbors):
    data = make_data()

    (batch,) = NeighborLoader(data, num_neighbors, [5, 9], batch_size=9, seed=1, device="cpu")

    assert_equal_batches(batch, next(iter(NeighborLoader(data, [2, 1], [5, 9], batch_size=9, seed=1, device="cpu"))))


def test_a_deprecated_word_means_induced():
    data = make_data()

    with pytest.warns(DeprecationWarning, match="subgraph_type='induced'"):
        loader = NeighborLoader(data, [2], [5, 9], batch_size=9, seed=1, device="cpu", directed=False)

    plain = NeighborLoader(data, [2], [5, 9], batch_size=9, seed=1, device="cpu", subgraph_type="induced")
    assert_equal_batches(next(iter(loader)), next(iter(plain)))


def test_the_defaults_of_pyg_may_be_written_out():
    options = {"input_time": None, "replace": False, "subgraph_type": SubgraphType.directional, "disjoint": False,
               "temporal_strategy": "uniform", "time_attr": None, "weight_attr": None, "is_sorted": False,
               "filter_per_worker": None, "neighbor_sampler": None, "directed": True}  # fmt: skip

    batches = list(NeighborLoader(make_data(), [2], None, **options, batch_size=16, seed=1, device="cpu"))

    for batch, other in zip(
        batches, NeighborLoader(make_data(), [2], batch_size=16, seed=1, device="cpu"), strict=True
    ):
        assert_equal_batches(batch, other)


@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_features_come_with_the_batch_whoever_should_filter(filter_per_worker):
    loader = NeighborLoader(make_data(), [2], device="cpu", filter_per_worker=filter_per_worker)

    assert next(iter(loader)).x.shape[1] == 5


class TestWorkers:
    """Nothing here needs worker processes, so their options are absorbed, unless it is said how to start them."""

    def test_options_of_workers_are_absorbed_with_one_word(self, real_device):
        with pytest.warns(LoaderWarning) as caught:
            loader = NeighborLoader(make_data(), [2], **WORKER_OPTIONS, batch_size=16, seed=1, device=real_device)

        assert [warning.filename for warning in caught] == [__file__]
        for name in WORKER_OPTIONS:
            assert f"{name}=" in str(caught[0].message)
        assert (loader.num_workers, loader.pin_memory) == (0, False)
        plain = NeighborLoader(make_data(), [2], batch_size=16, seed=1, device=real_device)
        assert_equal_epochs(loader, plain)

    @pytest.mark.parametrize("name", WORKER_OPTIONS)
    def test_each_option_is_named_alone(self, name):
        with pytest.warns(LoaderWarning, match=f"^{name}=[^,]*: not needed"):
            NeighborLoader(make_data(), [2], **{name: WORKER_OPTIONS[name]}, device="cpu")

    def test_their_defaults_are_not_worth_a_word(self):
        defaults = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "pin_memory": False}

        loader = NeighborLoader(make_data(), [2], **defaults, device="cpu")

        assert loader.num_workers == 0

    @pytest.mark.slow
    @pytest.mark.usefixtures("quick_starts")
    def test_spawned_workers_give_equal_batches(self, real_device):
        options = {"batch_size": 16, "shuffle": True, "seed": 1, "device": real_device}
        loader = NeighborLoader(make_data(), [3, 2], **options, num_workers=2, multiprocessing_context="spawn")

        batches = list(loader)

        for batch, other in zip(batches, NeighborLoader(make_data(), [3, 2], **options), strict=True):
            assert_equal_batches(batch, other)
            assert batch.x.device.type == real_device.type

    @pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
    @pytest.mark.parametrize("few_items", [run_kernel.FEW_ITEMS, 0])
    def test_forked_workers_give_equal_batches_on_the_cpu(self, few_items, monkeypatch):
        # The second time, all loops before the fork run on all cores.
        monkeypatch.setattr(run_kernel, "FEW_ITEMS", few_items)
        options = {"batch_size": 16, "shuffle": True, "seed": 1, "device": "cpu"}
        loader = NeighborLoader(make_data(), [3, 2], **options, num_workers=2, multiprocessing_context="fork")
        expected = list(NeighborLoader(make_data(), [3, 2], **options))

        batches = list(loader)

        assert_equal_epochs(batches, expected)

    @pytest.mark.gpu
    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    def test_forked_workers_are_refused_beside_a_gpu(self, method):
        with pytest.raises(ArgumentError, match=f"multiprocessing_context must be 'spawn' .*got '{method}'"):
            NeighborLoader(make_data(), [2], num_workers=2, multiprocessing_context=method)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prefetch": -1}, ArgumentError, "prefetch must be an integer of at least 0, got -1"),
        ({"prefetch": 1.5}, ArgumentError, "prefetch must be an integer"),
        ({"prefetch": True}, ArgumentError, "prefetch must be an integer"),
        ({"placement": "gpu"}, ArgumentError, "placement must be one of auto, cuda, unified, pinned, cpu"),
        ({"placement": "cuda"}, ArgumentError, "placement must be one that device=cpu can read, got 'cuda'"),
        ({"placement": "unified"}, ArgumentError, "placement must be one that device=cpu can.* 'auto' or 'cpu'$"),
        ({"topology_placement": "gpu"}, ArgumentError, "topology_placement must be one of auto, cuda, unified"),
        ({"topology_placement": "cuda"}, ArgumentError, "topology_placement must be one that device=cpu can read"),
        ({"seed": "1"}, ArgumentTypeError, "seed must be an integer or None, got '1'"),
        ({"seed": 1.0}, ArgumentTypeError, "seed must be an integer"),
        ({"feature_cache": "lots"}, ArgumentError, "feature_cache must look like"),
        ({"feature_cache": -5}, ArgumentError, "feature_cache must be at least 0"),
        ({"feature_cache": 0.5}, ArgumentTypeError, "feature_cache must be a number of bytes"),
        ({"num_neighbors": 5}, ArgumentTypeError, "num_neighbors must be a list of integers, got 5"),
        ({"num_neighbors": "15"}, ArgumentTypeError, "num_neighbors must be a list of integers"),
        ({"num_neighbors": np.array([2.0])}, ArgumentTypeError, "num_neighbors must hold integers, got 2.0"),
        ({"num_neighbors": [2.5]}, ArgumentTypeError, "num_neighbors must hold integers, got 2.5"),
        ({"num_neighbors": [True]}, ArgumentTypeError, "num_neighbors must hold integers, got True"),
        ({"num_neighbors": [3, -2]}, ArgumentError, "num_neighbors must hold values of at least -1, got -2"),
        ({"num_neighbors": [1] * 99}, ArgumentError, "num_neighbors must have at most .* hops, got 99"),
        ({"input_nodes": torch.ones(69).bool()}, ArgumentError, r"input_nodes must have shape \[70\] as a mask"),
        ({"input_nodes": np.ones(71, bool)}, ArgumentError, r"shape \[70\] as a mask, got \[71\]"),
        ({"input_nodes": [0, 70]}, ArgumentError, r"input_nodes must lie in \[0, 70\), got 70"),
        ({"input_nodes": [-1]}, ArgumentError, r"input_nodes must lie in \[0, 70\), got -1"),
        ({"input_nodes": [0.5]}, ArgumentTypeError, "input_nodes must have dtype int64 or int32, got torch.float32"),
        ({"input_nodes": torch.ones(70, dtype=torch.uint8)}, ArgumentTypeError, "input_nodes must have dtype int64"),
        ({"input_nodes": [[1, 2]]}, ArgumentError, "input_nodes must have one dimension"),
        ({"input_nodes": 3}, ArgumentError, "input_nodes must have one dimension"),
        ({"input_nodes": "paper"}, ArgumentTypeError, "input_nodes must be ids or a mask, got 'paper'"),
        ({"input_nodes": ("paper", [1])}, ArgumentTypeError, "input_nodes must be ids or a mask"),
        ({"data": None}, ArgumentTypeError, "data must be a Data, a HeteroData or a tuple .* got NoneType"),
        ({"data": (1, 2)}, ArgumentTypeError, "data must be a Data, a HeteroData or a tuple .* got tuple"),
        ({"num_neighbors": {("a", "to", "b"): [2]}}, ArgumentError, "num_neighbors must be a list for a graph without"),
        ({"subgraph_type": "whole"}, ArgumentError, "subgraph_type must be one of directional, bidirectional, induced"),
        ({"temporal_strategy": "first"}, ArgumentError, "temporal_strategy must be one of uniform, last, got 'first'"),
        ({"time_comparison": ">"}, ArgumentError, "time_comparison must be one of <=, <, got '>'"),
        ({"time_window": 5}, ArgumentError, "time_window needs time_attr"),
        ({"input_time": torch.zeros(70).long()}, ArgumentError, "input_time needs time_attr"),
        ({"time_attr": "when"}, ArgumentError, "time_attr must name an attribute of data, got 'when'"),
        ({"weight_attr": "w"}, ArgumentError, "weight_attr must name an attribute of data, got 'w'"),
        ({"store_dtype": torch.int8}, ArgumentError, "store_dtype must be one of"),
        ({"topology_cache": "lots"}, ArgumentError, "topology_cache must look like"),
        ({"disjoint": True, "layer_dependency": True}, ArgumentError, "layer_dependency must be False with"),
        ({"data": Data()}, ArgumentError, "data must know its number of nodes; set data.num_nodes"),
        ({"input_id": torch.arange(3)}, ArgumentError, r"input_id must have an id for each of the 70 seeds, "),
        ({"input_id": [1] * 70, "disjoint": True}, ArgumentTypeError, "input_id must be a tensor, got list"),
        ({"time_window": 5, "disjoint": True}, ArgumentError, "time_window needs time_attr"),
        ({"neighbor_sampler": 5}, ArgumentTypeError, "sampler must have sample_from_nodes, .* got int"),
        ({"device": "tpu"}, ArgumentError, "device must name a torch device"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batchsize": 3}, TypeError, "batchsize"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    arguments = {"data": make_data(), "num_neighbors": [2], "device": "cpu", **options}

    with pytest.raises(error, match=words):
        NeighborLoader(**arguments)


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [([70], ArgumentError, r"index must lie in \[0, 70\), got 70"), ([-1], ArgumentError, "index must lie in"),
     ([0.5], ArgumentTypeError, "index must have dtype int64 or int32"),
     ([True], ArgumentError, r"index must have shape \[70\] as a mask of the seeds, got \[1\]"),
     ("all", ArgumentTypeError, "index must be ids, got 'all'"), (None, ArgumentTypeError, "index must be ids, got")],
)  # fmt: skip
def test_bad_positions_are_named_and_the_loader_stays_usable(real_device, index, error, words):
    loader = NeighborLoader(make_data(), [2], device=real_device)

    with pytest.raises(error, match=words):
        loader(index)

    assert loader([69]).n_id[0] == 69


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(DeviceError, match="device='cuda' asks for a GPU"):
        NeighborLoader(make_data(), [2], device="cuda")
    assert NeighborLoader(make_data(), [2]).device == torch.device("cpu")


@pytest.mark.gpu
def test_the_current_gpu_is_the_default():
    loader = NeighborLoader(make_data(), [2])

    assert loader.device == torch.device("cuda", torch.cuda.current_device())
    assert next(iter(loader)).x.device == loader.device


@pytest.mark.gpu
def test_rows_of_the_cpu_are_no_placement_for_a_gpu():
    with pytest.raises(ArgumentError, match="placement must be one that device=cuda:0 can read, got 'cpu'"):
        NeighborLoader(make_data(), [2], placement="cpu")


def test_nothing_is_said_about_plain_loaders(real_device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        batches = list(NeighborLoader(make_data(), [2], batch_size=16, shuffle=True, device=real_device))

    assert len(batches) == 5
