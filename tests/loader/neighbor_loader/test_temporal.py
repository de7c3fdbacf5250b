"""Times, weights, trees and subgraphs of a `Data`: never a later neighbor, and what PyG's loader gives where it can."""

import pytest
import torch
from torch_geometric.loader import NeighborLoader as PygNeighborLoader

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.sampler import NeighborSampler
from tests.batches import assert_equal_epochs, make_data
from tests.graphs import make_random_graph


def make_timed(**attributes):
    """A graph with times of nodes and of edges, and weights."""
    generator = torch.Generator().manual_seed(7)
    return make_data(time=torch.randint(0, 20, (70,), generator=generator),
                     edge_time=torch.randint(-5, 20, (600,), generator=generator),
                     weight=torch.rand(600, generator=generator) * (torch.arange(600) % 3 > 0), **attributes
                     )  # fmt: skip


def load(data, fanouts, device, **options):
    """All batches of some seeds."""
    seeds = torch.tensor([4, 40, 3, 3, 66, 12])
    return list(NeighborLoader(data, fanouts, seeds, batch_size=4, seed=2, device=device, **options))


def check_edges(data, batch):
    """Every edge is one of the graph's, within its tree."""
    source, target = batch.edge_index
    ends = torch.stack([batch.n_id[source], batch.n_id[target]]).cpu()
    assert torch.equal(ends, data.edge_index[:, batch.e_id.cpu()])
    assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
    assert torch.equal(batch.batch[source], batch.batch[target])


@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("weight_attr", [None, "weight"])
@pytest.mark.parametrize("comparison", ["<=", "<"])
def test_no_neighbor_is_later_than_its_seed(real_device, subgraph_type, strategy, weight_attr, comparison):
    data, times = make_timed(), torch.tensor([3, 9, 15, 0, 19, 7])

    batches = load(data, [3, 2], real_device, time_attr="time", input_time=times, subgraph_type=subgraph_type,
                   temporal_strategy=strategy, weight_attr=weight_attr, time_comparison=comparison)  # fmt: skip

    assert torch.cat([batch.seed_time.cpu() for batch in batches]).tolist() == times.tolist()
    for batch in batches:
        check_edges(data, batch)
        source = batch.edge_index[0]
        assert bool((source >= batch.batch_size).any())
        met, until = batch.time[source], batch.seed_time[batch.batch[source]]
        assert bool((met <= until).all() if comparison == "<=" else (met < until).all())


class TestWindows:
    """Each seed has a window of its own."""

    START, END = torch.tensor([3, 9, -5, 0, 19, 7]), torch.tensor([9, 9, 15, 20, 19, 6])

    def check_window(self, batch, met, trees):
        begin, end = batch.seed_start_time[trees], batch.seed_time[trees]
        assert met.numel() > 0
        assert bool(((begin <= met) & (met <= end)).all())

    @pytest.mark.parametrize("strategy", ["uniform", "last"])
    @pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
    @pytest.mark.parametrize("weight_attr", [None, "weight"])
    def test_no_edge_lies_outside_that_of_its_seed(self, real_device, strategy, subgraph_type, weight_attr):
        data = make_timed()

        batches = load(data, [-1, 2], real_device, time_attr="edge_time", input_start_time=self.START,
                       input_end_time=self.END, temporal_strategy=strategy, subgraph_type=subgraph_type,
                       weight_attr=weight_attr)  # fmt: skip

        assert torch.cat([batch.seed_start_time.cpu() for batch in batches]).tolist() == self.START.tolist()
        assert torch.cat([batch.seed_time.cpu() for batch in batches]).tolist() == self.END.tolist()
        for batch in batches:
            check_edges(data, batch)
            self.check_window(batch, batch.edge_time, batch.batch[batch.edge_index[1]])
        # All edges of the first seed that its window allows.
        own = (data.edge_index[1] == 4) & (data.edge_time >= 3) & (data.edge_time <= 9)
        found = batches[0].e_id[batches[0].edge_index[1] == 0].sort().values.tolist()
        assert found == own.nonzero().view(-1).tolist() or weight_attr is not None or subgraph_type == "induced"

    def test_batches_of_windows_of_one_length_are_those_of_a_window(self, real_device):
        data, end = make_timed(), torch.tensor([3, 9, 15, 0, 19, 7])
        options = {"time_attr": "time", "weight_attr": "weight"}

        got = load(data, [3, 2], real_device, input_start_time=end - 4, input_end_time=end, super_batch=2, **options)

        expected = load(data, [3, 2], "cpu", input_time=end, time_window=5, **options)
        for batch in got:
            del batch.seed_start_time
        assert_equal_epochs(got, expected)

    def test_types_too(self, real_device):
        data = make_timed().to_heterogeneous()
        seeds = "0", torch.tensor([4, 40, 3])
        loader = NeighborLoader(data, [3, 2], seeds, batch_size=2, time_attr="time", input_start_time=self.START[:3],
                                input_end_time=self.END[:3], device=real_device, seed=2)  # fmt: skip

        first, second = loader

        assert first["0"].seed_start_time.tolist() == [3, 9]
        assert second["0"].seed_time.tolist() == [15]
        for batch in (first, second):
            nodes, sources = batch["0"], batch["0", "0", "0"].edge_index[0]
            self.check_window(nodes, nodes.time[sources], nodes.batch[sources])

    @pytest.mark.parametrize(("options", "error", "words"), [
        ({"input_start_time": START}, ArgumentError, "input_end_time must be given with input_start_time, got None"),
        ({"input_end_time": END}, ArgumentError, "input_start_time must be given with input_end_time, got None"),
        ({"input_start_time": START, "input_end_time": END, "input_time": END}, ArgumentError,
         "input_time must be None beside input_start_time"),
        ({"input_start_time": START, "input_end_time": END, "time_window": 3}, ArgumentError,
         "time_window must be None beside input_start_time"),
        ({"input_start_time": START[:4], "input_end_time": END}, ArgumentError,
         r"input_start_time must have shape \(6,\), one for each seed, got \(4,\)"),
        ({"input_start_time": START[:4], "input_end_time": END[:4]}, ArgumentError,
         r"input_start_time must have shape \(6,\), one for each seed, got \(4,\)"),
        ({"input_start_time": START, "input_end_time": END[:, None]}, ArgumentError, "input_end_time must have one"),
        ({"input_start_time": START.float(), "input_end_time": END}, ArgumentTypeError, "input_start_time must be a"),
        ({"input_start_time": START, "input_end_time": [9] * 6}, ArgumentTypeError, "input_end_time must be a tensor"),
        ({"input_time": torch.stack([START, END], 1)}, ArgumentError, "windows are input_start_time and input_end"),
        ({"input_start_time": START, "input_end_time": END, "time_attr": None}, ArgumentError,
         "input_start_time needs time_attr"),
    ])  # fmt: skip
    def test_bad_ones_are_named(self, options, error, words):
        with pytest.raises(error, match=words):
            load(make_timed(), [2], "cpu", **{"time_attr": "time", **options})


@pytest.mark.parametrize("typed", [False, True])
def test_attributes_of_timed_batches_come_in_pygs_order(real_device, typed):
    data, seeds = make_timed(), torch.tensor([4, 40, 3])
    if typed:
        data, seeds = data.to_heterogeneous(), ("0", seeds)
    options = {"input_time": torch.tensor([3, 9, 15]), "time_attr": "time", "batch_size": 3}
    sampler = NeighborSampler(data, [-1], time_attr="time", device="cpu")

    (batch,) = NeighborLoader(data, [-1], seeds, device=real_device, **options)

    (expected,) = PygNeighborLoader(data, [-1], seeds, neighbor_sampler=sampler, **options)
    assert [list(store) for store in batch.stores] == [list(store) for store in expected.stores]


@pytest.mark.parametrize("window", [None, 6])
def test_no_edge_is_later_than_its_seed_nor_outside_the_window(real_device, window):
    data, times = make_timed(), torch.tensor([3, 9, 15, 0, 19, 7])

    batches = load(data, [-1, 2], real_device, time_attr="edge_time", input_time=times, time_window=window)

    for batch in batches:
        check_edges(data, batch)
        ages = batch.seed_time[batch.batch[batch.edge_index[1]]] - batch.edge_time
        assert ages.numel() > 0
        assert bool((ages >= 0).all())
        assert window is None or bool((ages < window).all())


def test_the_last_edges_are_the_latest_allowed(real_device):
    data, until = make_timed(), 12

    (batch,) = NeighborLoader(data, [2], [3], input_time=torch.tensor([until]), time_attr="edge_time",
                              temporal_strategy="last", batch_size=1, device=real_device)  # fmt: skip

    times = data.edge_time[data.edge_index[1] == 3]
    assert sorted(batch.edge_time.tolist()) == times[times <= until].sort().values[-2:].tolist()


def test_seeds_have_times_of_their_own(real_device):
    data = make_timed()

    batches = load(data, [-1], real_device, time_attr="time")

    for batch in batches:
        assert "seed_time" not in batch
        met = batch.time[batch.edge_index[0]]
        assert bool((met <= batch.time[: batch.batch_size][batch.batch[batch.edge_index[0]]]).all())


def test_neighbors_without_weight_are_not_drawn(real_device):
    data = make_timed()

    batches = load(data, [1, 1], real_device, weight_attr="weight")

    for batch in batches:
        degrees = torch.zeros(70, dtype=torch.int64).index_add_(0, data.edge_index[1], (data.weight > 0).long())
        expanded = batch.n_id.cpu()[batch.edge_index[1].cpu()]
        is_free = degrees[expanded] > 0
        assert bool(is_free.any())
        assert bool((batch.weight.cpu()[is_free] > 0).all())


@pytest.mark.parametrize("disjoint", [False, True])
def test_induced_batches_have_all_edges_among_their_nodes(real_device, disjoint):
    data = make_timed()

    for batch in load(data, [3, 2], real_device, subgraph_type="induced", disjoint=disjoint):
        trees = batch.batch.cpu() if disjoint else torch.zeros(batch.num_nodes, dtype=torch.int64)
        nodes = batch.n_id.cpu()
        assert "num_sampled_nodes" not in batch
        for tree in trees.unique():
            inside = torch.zeros(70, dtype=torch.bool)
            inside[nodes[trees == tree]] = True
            # A repeated seed has two rows and its edges twice.
            is_repeated = not disjoint and bool((torch.bincount(nodes) > 1).any())
            expected = (inside[data.edge_index[0]] & inside[data.edge_index[1]]).nonzero().view(-1)
            own = batch.e_id.cpu()[trees[batch.edge_index[0].cpu()] == tree]
            assert own.unique().tolist() == expected.tolist()
            assert is_repeated or own.numel() == expected.numel()


@pytest.mark.sparse
def test_induced_batches_are_those_of_pyg(real_device):
    data, seeds = make_timed(), torch.tensor([4, 40, 66, 12])
    options = {"input_nodes": seeds, "subgraph_type": "induced", "batch_size": 4}

    (batch,) = NeighborLoader(data, [-1, -1], **options, device=real_device)

    (expected,) = PygNeighborLoader(data, [-1, -1], **options)
    assert set(batch.keys()) == set(expected.keys())
    assert sorted(batch.n_id.tolist()) == sorted(expected.n_id.tolist())
    assert sorted(batch.e_id.tolist()) == sorted(expected.e_id.tolist())


def test_bidirectional_batches_have_every_edge_both_ways(real_device):
    data = make_timed()

    for batch in load(data, [3, 2], real_device, subgraph_type="bidirectional"):
        edges = set(zip(*batch.edge_index.tolist(), strict=True))
        assert edges == {(b, a) for a, b in edges}
        assert len(edges) == batch.num_edges == batch.e_id.numel()


def test_edits_before_the_first_epoch_take_effect(real_device):
    data = make_timed()
    loader = NeighborLoader(data, [-1], [3], time_attr="time", batch_size=1, device=real_device)

    data.time = torch.full((70,), 5)
    data.edge_index = torch.tensor([[9, 8], [3, 5]])
    data.edge_attr = data.edge_time = data.weight = None

    (batch,) = loader
    assert batch.n_id.tolist() == [3, 9]


def test_batches_are_equal_on_every_device_and_for_any_pace(real_device):
    data = make_timed()
    options = {"time_attr": "time", "weight_attr": "weight", "subgraph_type": "induced"}

    batches = load(data, [3, 2], real_device, **options, prefetch=2)

    assert_equal_epochs(batches, load(make_timed(), [3, 2], torch.device("cpu"), **options))


class TestStoredRows:
    """`store_dtype` narrows features, and leaves what is short or no float32 as it is."""

    @pytest.mark.parametrize("disjoint", [False, True])
    def test_features_are_rounded_and_labels_are_not(self, real_device, disjoint):
        data = make_data(target=torch.rand(70), wide=torch.rand(70, 9), double=torch.rand(70, 9).double())

        (batch,) = NeighborLoader(data, [2], [5, 6], batch_size=2, store_dtype=torch.bfloat16, disjoint=disjoint,
                                  device=real_device)  # fmt: skip

        ids = batch.n_id.cpu()
        assert torch.equal(batch.wide.cpu(), data.wide[ids].bfloat16().float())
        assert torch.equal(batch.target.cpu(), data.target[ids])
        assert torch.equal(batch.double.cpu(), data.double[ids])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"time_attr": "time", "input_time": torch.zeros(5).long()}, ArgumentError, r"shape \(6,\), one for each seed"),
        ({"time_attr": "time", "input_time": torch.zeros(6)}, ArgumentTypeError, "input_time must be a tensor of int"),
        ({"time_attr": "time", "is_sorted": True}, ArgumentError, "is_sorted=True needs rows sorted by time"),
        ({"time_attr": "odd"}, ArgumentError, "'odd' is neither"),
        ({"time_attr": "x"}, (ArgumentError, ArgumentTypeError), "must hold integers"),
        ({"weight_attr": "negative"}, ArgumentError, "finite and not negative, got -1.0"),
        ({"weight_attr": "nan"}, ArgumentError, "finite and not negative, got nan"),
        ({"weight_attr": "names"}, ArgumentTypeError, "^weight_attr='names' must be a tensor, got list"),
        ({"weight_attr": "time"}, ArgumentError, r"must have shape \(600,\), got \(70,\)"),
        ({"time_attr": "edge_time"}, ArgumentError, "must be given for a graph whose edges have times"),
    ],
)  # fmt: skip
def test_bad_times_and_weights_are_named(options, error, words):
    data = make_timed(negative=-torch.ones(600), nan=torch.full((600,), float("nan")), odd=torch.zeros(3),
                      names=["?"] * 600)  # fmt: skip
    seeds = torch.tensor([4, 40, 3, 3, 66, 12])

    with pytest.raises(error, match=words):
        list(NeighborLoader(data, [2], seeds, batch_size=4, device="cpu", **options))


def test_rows_sorted_by_time_are_taken_as_they_are(real_device):
    graph = make_random_graph(70, 600)
    order = graph.edge_index[0].argsort(stable=True)
    data = make_data(graph._replace(edge_index=graph.edge_index[:, order]), time=torch.arange(70))

    batches = load(data, [3], real_device, time_attr="time", is_sorted=True)

    assert_equal_epochs(batches, load(data, [3], real_device, time_attr="time"))
