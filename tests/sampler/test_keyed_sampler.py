"""What programs put in the place of ours is called as PyG calls it, and what it returns is checked, not believed."""

import functools

import pytest
import torch
from torch_geometric.nn import GraphSAGE, SAGEConv
from torch_geometric.sampler import BaseSampler, NegativeSampling

from pyg_direct import HGTLoader, LinkNeighborLoader, NeighborLoader, accelerate, infer, to_edge_index
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.loader import LinkLoader, NodeLoader, ShaDowKHopSampler
from pyg_direct.loader.legacy_neighbor_loader import NeighborSampler as LayerSampler
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.sampler import HGTSampler, NeighborSampler
from tests.batches import make_data
from tests.hetero_data import make_hetero

WRITES = ("author", "writes", "paper")
OPTIONS = [{"prefetch": 0}, {"prefetch": 1}, {"super_batch": 3}]


class Asked(NeighborSampler):
    """Takes PyG's arguments alone, and counts how often it is asked."""

    calls = 0

    def sample_from_nodes(self, index):
        self.calls += 1
        return self.change(super().sample_from_nodes(index))

    def sample_from_edges(self, index, neg_sampling=None):
        self.calls += 1
        return self.change(super().sample_from_edges(index, neg_sampling))

    def change(self, out):
        return out


class Shuffled(Asked):
    def change(self, out):
        parts = [out.row, out.col, out.edge]
        if not isinstance(out.row, dict):
            order = torch.arange(out.row.numel(), device=out.row.device).flip(0)
            out.row, out.col, out.edge = (part[order] for part in parts)
            return out
        out.row, out.col, out.edge = ({kind: ids.flip(0) for kind, ids in part.items()} for part in parts)
        return out


class Longer(Asked):
    """Adds edges that no hop counts."""

    def change(self, out):
        out.row, out.col, out.edge = (torch.cat([part, part[:1]]) for part in (out.row, out.col, out.edge))
        return out


class Outside(Asked):
    def change(self, out):
        out.node = {kind: ids + 1000 for kind, ids in out.node.items()} if isinstance(out.node, dict) else -out.node - 1
        return out


class Wrapped(Asked):
    """Has edges that lead past the nodes of the batch."""

    def change(self, out):
        out.row[-1] = 10**9
        return out


def make_typed():
    data = make_hetero()
    for kind in data.node_types:
        data[kind].x = torch.rand(data[kind].num_nodes, 16)
    return data


def make_plain():
    data = make_data()
    data.x = torch.rand(data.num_nodes, 16)
    return data


LOADERS = {
    "nodes": lambda kind, device, **options: NodeLoader(
        (data := make_plain()), kind(data, [4, 3], device=device, seed=1), torch.arange(24), batch_size=8,
        device=device, seed=2, **options),
    "neighbors": lambda kind, device, **options: NeighborLoader(
        (data := make_plain()), [4, 3], torch.arange(24), batch_size=8, device=device, seed=2,
        neighbor_sampler=kind(data, [4, 3], device=device, seed=1), **options),
    "links": lambda kind, device, **options: LinkLoader(
        (data := make_plain()), kind(data, [4, 3], device=device, seed=1), data.edge_index[:, :24], batch_size=8,
        neg_sampling="binary", device=device, seed=2, **options),
    "neighbors of links": lambda kind, device, **options: LinkNeighborLoader(
        (data := make_plain()), [4, 3], data.edge_index[:, :24], batch_size=8, device=device, seed=2,
        neighbor_sampler=kind(data, [4, 3], device=device, seed=1), **options),
    "types": lambda kind, device, **options: NeighborLoader(
        (data := make_typed()), [4, 3], ("paper", torch.arange(24)), batch_size=8, device=device, seed=2,
        neighbor_sampler=kind(data, [4, 3], device=device, seed=1), **options),
    "links of types": lambda kind, device, **options: LinkNeighborLoader(
        (data := make_typed()), [4, 3], WRITES, batch_size=32, device=device, seed=2,
        neighbor_sampler=kind(data, [4, 3], device=device, seed=1), **options),
}  # fmt: skip


def choose(name, options):
    """Options that a loader takes."""
    return {} if name in ("nodes", "links") and "super_batch" in options else options


def list_edges(batch):
    return [store.edge_index for store in batch.edge_stores]


def list_ids(batches):
    return [[store.n_id.tolist() for store in batch.node_stores] for batch in batches]


@pytest.mark.parametrize("options", OPTIONS, ids=["alone", "ahead", "together"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_sampler_of_a_program_is_asked_for_each_batch(real_device, name, options):
    torch.manual_seed(3)
    loader = LOADERS[name](Asked, real_device, **choose(name, options))
    torch.manual_seed(3)
    plain = LOADERS[name](NeighborSampler, real_device, **choose(name, options))

    got, expected = [list(loader), list(loader)], [list(plain), list(plain)]

    assert loader._sampler.calls == 2 * len(loader)
    # Under the keys of the batches, though its methods do not take any.
    assert list(map(list_ids, got)) == list(map(list_ids, expected))
    assert list_ids(got[0]) != list_ids(got[1])


@pytest.mark.parametrize("options", OPTIONS, ids=["alone", "ahead", "together"])
@pytest.mark.parametrize("name", LOADERS)
def test_edges_that_a_sampler_of_a_program_shuffles_are_not_taken_for_sorted(real_device, name, options):
    loader = LOADERS[name](Shuffled, real_device, **choose(name, options))

    for batch in loader:
        for edge_index in list_edges(batch):
            assert find_batch(edge_index) is None or bool((edge_index[1].diff() >= 0).all())
        assert all(not edge_index.is_sorted or bool((edge_index.as_tensor()[1].diff() >= 0).all())
                   for edge_index in list_edges(to_edge_index(batch)))  # fmt: skip


@pytest.mark.parametrize("kind", [Shuffled, Longer])
def test_accelerated_models_stay_those_of_pyg_over_such_edges(real_device, kind):
    batch = next(iter(LOADERS["neighbors"](kind, real_device)))
    model = SAGEConv(16, 8).to(real_device)
    expected = model(batch.x, batch.edge_index)

    accelerate(model)

    torch.testing.assert_close(model(batch.x, batch.edge_index), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOADERS)
def test_edges_that_such_a_sampler_leaves_in_order_are_known(real_device, name):
    batch = next(iter(LOADERS[name](Asked, real_device)))

    edges = [edge_index for edge_index in list_edges(batch) if edge_index.numel()]
    assert edges
    assert all(find_batch(edge_index) is not None for edge_index in edges)


@pytest.mark.parametrize("name", ["neighbors", "links", "types"])
def test_ids_of_a_sampler_of_a_program_are_checked(name):
    with pytest.raises(IdError, match=r"must lie in \[0, "):
        list(LOADERS[name](Outside, torch.device("cpu")))


def test_edges_past_the_nodes_are_not_known(real_device):
    batch = next(iter(LOADERS["neighbors"](Wrapped, real_device)))

    assert find_batch(batch.edge_index) is None


def test_a_permutation_of_edges_of_a_program_is_applied():
    class Permuted(NeighborSampler):
        edge_permutation = property(lambda self: torch.arange(make_data().num_edges).flip(0))

    got, plain = (next(iter(LOADERS["neighbors"](kind, "cpu"))) for kind in (Permuted, NeighborSampler))

    assert got.e_id.tolist() == (make_data().num_edges - 1 - plain.e_id).tolist()


def count_calls(calls, method):
    # It bears the name and the module of ours.
    @functools.wraps(method)
    def counted(*args, **kwargs):
        calls.append(method.__name__)
        return method(*args, **kwargs)

    return counted


@pytest.mark.parametrize("options", OPTIONS, ids=["alone", "ahead", "together"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_method_that_a_program_puts_on_a_sampler_is_called(name, options):
    loader, calls = LOADERS[name](NeighborSampler, "cpu", **choose(name, options)), []
    step = "sample_from_edges" if "links" in name else "sample_from_nodes"
    plain = list_ids(list(loader))
    loader.load_state_dict({"seed": loader.seed, "epoch": 0, "batch": 0})

    setattr(loader._sampler, step, count_calls(calls, getattr(loader._sampler, step)))

    assert list_ids(list(loader)) == plain
    assert calls == [step] * len(loader)


def test_a_method_that_a_program_puts_on_a_class_is_called(monkeypatch):
    loader, calls = LOADERS["links"](NeighborSampler, "cpu"), []

    monkeypatch.setattr(NeighborSampler, "sample_from_edges", count_calls(calls, NeighborSampler.sample_from_edges))
    list(loader)

    assert calls == ["sample_from_edges"] * len(loader)


def test_a_sampler_of_hgt_is_asked_and_checked(real_device):
    class Mine(HGTSampler):
        def sample_from_nodes(self, index):
            calls.append(index.node.numel())
            return super().sample_from_nodes(index)

    calls, data = [], make_typed()
    options = {"batch_size": 8, "seed": 2, "device": real_device}
    loader = NodeLoader(data, Mine(data, [6, 6], seed=1, device=real_device), ("paper", torch.arange(16)), **options)

    got = list(loader)

    assert calls == [8, 8]
    expected = HGTLoader(data, [6, 6], ("paper", torch.arange(16)), **options)
    assert list_ids(got) == list_ids(expected)


class Copied(BaseSampler):
    """Of PyG's interface alone: what another one samples."""

    def __init__(self, sampler):
        self.sampler, self.calls = sampler, 0

    def sample_from_nodes(self, index, **kwargs):
        self.calls += 1
        return self.sampler.sample_from_nodes(index)

    def sample_from_edges(self, index, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize("way", ["method", "sampler"])
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 1}], ids=["alone", "ahead"])
def test_a_program_may_replace_the_sampler_of_a_plain_loader(real_device, way, options):
    def make():
        return NeighborLoader(data, [4, 3], torch.arange(24), batch_size=8, seed=2, device=real_device, **options)

    data, calls = make_plain(), []
    loader, expected = make(), list(make())

    if way == "method":
        loader.node_sampler.sample_from_nodes = count_calls(calls, loader.node_sampler.sample_from_nodes)
    else:
        loader.node_sampler = Copied(loader.node_sampler)
    got = list(loader)

    assert (len(calls) if way == "method" else loader.node_sampler.calls) == 3
    assert list_ids(got) == list_ids(expected)
    for batch, plain in zip(got, expected, strict=True):
        assert torch.equal(batch.x, plain.x)
        assert torch.equal(batch.edge_index, plain.edge_index)
        assert (batch.batch_size, batch.input_id.tolist()) == (plain.batch_size, plain.input_id.tolist())
    assert loader(torch.tensor([3, 5])).batch_size == 2


def test_a_sampler_of_ours_that_a_programs_own_calls_draws_under_the_key_of_the_batch(real_device):
    data, options = make_typed(), {"batch_size": 8, "seed": 2, "device": real_device}
    seeds = "paper", torch.arange(24)
    loader = NodeLoader(data, Copied(NeighborSampler(data, [4, 3], device=real_device)), seeds, **options)

    epochs = [list_ids(loader) for _ in range(2)]
    loader.load_state_dict({"seed": 2, "epoch": 0, "batch": 1})

    expected = NeighborLoader(data, [4, 3], seeds, **options)
    assert epochs == [list_ids(expected) for _ in range(2)]
    assert list_ids(loader) == epochs[0][1:]


def test_hooks_that_a_program_puts_on_a_loader_are_called_or_refused():
    loader, seen = LOADERS["neighbors"](NeighborSampler, "cpu"), []

    loader.filter_fn = lambda out: seen.append(out.node.numel()) or out
    batches = list(loader)
    assert len(seen) == 3
    assert all(batch.node.numel() == count for batch, count in zip(batches, seen, strict=True))

    loader.collate_fn = lambda index: index
    with pytest.raises(NotImplementedError, match=r"collate_fn of .* would not be called"):
        next(iter(loader))


def test_a_class_with_shadows_own_hook_is_refused():
    class Mine(ShaDowKHopSampler):
        def __collate__(self, n_id):
            return n_id

    with pytest.raises(NotImplementedError, match=r"__collate__ of .*Mine would not be called"):
        Mine(make_data(), 2, 3, device="cpu")


def test_layers_come_from_a_method_that_a_class_replaces(real_device):
    class Mine(LayerSampler):
        def sample(self, batch):
            assert isinstance(batch, list)
            return "mine", super().sample(batch)

    options = {"sizes": [3, 2], "batch_size": 8, "seed": 1, "device": real_device}

    got, expected = (list(kind(make_data().edge_index, **options)) for kind in (Mine, LayerSampler))

    assert [name for name, _ in got] == ["mine"] * len(expected)
    for (_, (size, n_id, _)), (plain_size, plain_n_id, _) in zip(got, expected, strict=True):
        assert (size, n_id.tolist()) == (plain_size, plain_n_id.tolist())


class Sevens(NegativeSampling):
    """Draws node 7, and notes what for."""

    def sample(self, num_samples, endpoint, num_nodes=None):
        self.__dict__.setdefault("asked", []).append((num_samples, endpoint, num_nodes))
        return torch.full((num_samples,), 7)


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_negatives_come_from_a_method_that_a_class_replaces(real_device, mode):
    negatives, data = Sevens(mode, 2), make_data()
    loader = LinkNeighborLoader(data, [3], data.edge_index[:, :8], batch_size=8, neg_sampling=negatives,
                                device=real_device)  # fmt: skip

    batch = next(iter(loader))

    ends = batch.edge_label_index[:, 8:] if mode == "binary" else batch.dst_neg_index
    assert batch.n_id[ends].unique().tolist() == [7]
    ends = ["src", "dst"] if mode == "binary" else ["dst"]
    assert sorted(negatives.asked) == sorted((16, end, data.num_nodes) for end in ends)


def test_negatives_that_a_class_draws_outside_the_graph_are_refused():
    class Outside(NegativeSampling):
        def sample(self, num_samples, endpoint, num_nodes=None):
            return torch.full((num_samples,), num_nodes)

    loader = LinkNeighborLoader(make_data(), [3], batch_size=8, neg_sampling=Outside("binary"), device="cpu")

    with pytest.raises(IdError, match=r"neg_sampling\.sample must lie in"):
        next(iter(loader))


@pytest.mark.parametrize("name", ["plain", *LOADERS])
def test_fanouts_that_are_set_while_batches_are_ahead_leave_their_bounds(real_device, name):
    if name == "plain":
        loader = NeighborLoader(make_data(), [4, 3], torch.arange(24), batch_size=8, device=real_device, prefetch=2)
        sampler = loader.node_sampler
    else:
        loader = LOADERS[name](NeighborSampler, real_device, prefetch=2)
        sampler = loader._sampler
    batches = iter(loader)
    first = next(batches)

    sampler.num_neighbors = [1, 1]

    for batch in (first, *batches):
        for edge_index in list_edges(batch):
            known = find_batch(edge_index)
            if edge_index.numel():
                assert known.max_degree >= int(edge_index[1].bincount().max())


def test_a_loader_that_a_program_changes_is_not_gone_past_in_inference():
    class Mine(NeighborLoader):
        def filter_fn(self, out):
            return super().filter_fn(out)

    model = GraphSAGE(16, 8, 2).eval()

    with pytest.raises(ArgumentError, match=r"data must be a loader without a sampler, filter_fn"):
        infer(model, Mine(make_plain(), [-1], batch_size=8, device="cpu"))


@pytest.mark.parametrize("name", LOADERS)
def test_samples_that_a_hook_of_a_program_changes_are_not_believed(real_device, name):
    class Mine(type(LOADERS[name](NeighborSampler, real_device))):
        def filter_fn(self, out):
            return super().filter_fn(Shuffled.change(None, out))

    plain = LOADERS[name](NeighborSampler, real_device, prefetch=0)
    plain.__class__ = Mine

    for batch in plain:
        for edge_index in list_edges(batch):
            assert find_batch(edge_index) is None or bool((edge_index[1].diff() >= 0).all())


def test_ids_that_a_hook_of_a_program_changes_are_checked():
    loader = LOADERS["nodes"](NeighborSampler, "cpu")
    out = loader._sampler.sample_from_nodes(loader.input_data[torch.arange(4)])
    out.node = out.node + 1000

    with pytest.raises(IdError, match=r"must lie in \[0, "):
        loader.filter_fn(out)
