"""PyG's names make our loaders, and PyG's own for what ours does not offer."""

import copy
import functools
import inspect
import pickle
import random
import types
import warnings

import pytest
import torch
import torch_geometric
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import neighbor_loader
from torch_geometric.nn import GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

import pyg_direct
from pyg_direct.loader.inference import infer
from pyg_direct.noedit import install, program_record
from pyg_direct.noedit.install import REPLACEMENTS
from pyg_direct.noedit.program_record import is_watched
from pyg_direct.noedit.replaced_class import StandIn, give_back, replace
from tests.graphs import make_random_graph
from tests.loader.data_loader.small_graphs import InMemory, make_molecules

PYG = {entry.path: entry.original for entry in REPLACEMENTS}
# As a program has it that imported it before.
NAMED = torch_geometric.loader.NeighborLoader
GRAPH = make_random_graph(70, 600)


def make_data():
    return Data(x=torch.randn(70, 3), y=torch.arange(70), edge_index=GRAPH.edge_index)


def make_hetero_data():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(70, 3), torch.randn(70, 3)
    data["a", "to", "b"].edge_index = data["b", "back", "a"].edge_index = GRAPH.edge_index
    return data


@pytest.mark.usefixtures("_installed")
def test_pygs_name_makes_ours():
    loader = torch_geometric.loader.NeighborLoader(make_data(), [3, 2], batch_size=8, seed=1)

    expected = pyg_direct.NeighborLoader(make_data(), [3, 2], batch_size=8, seed=1, device="cpu")

    assert type(loader) is pyg_direct.NeighborLoader
    assert [batch.n_id.tolist() for batch in loader] == [batch.n_id.tolist() for batch in expected]


def test_methods_of_tensors_stay_torchs():
    # Torch reads a list of numbers in tensors otherwise than one of lists, which it asks the class itself.
    before = set(vars(torch.Tensor))

    pyg_direct.install()
    try:
        assert set(vars(torch.Tensor)) == before
        assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    finally:
        pyg_direct.uninstall()


@pytest.mark.usefixtures("_installed")
def test_the_text_of_a_loader_is_pygs_where_pyg_has_one():
    data = make_data()
    loaders = [torch_geometric.loader.NeighborLoader(data, [3]),
               torch_geometric.loader.LinkNeighborLoader(data, [3], edge_label_index=data.edge_index[:, :4]),
               torch_geometric.loader.NeighborSampler(data.edge_index, [3, 2])]  # fmt: skip

    assert [repr(loader) for loader in loaders] == [
        "NeighborLoader()", "LinkNeighborLoader()", "NeighborSampler(sizes=[3, 2])"]  # fmt: skip
    assert repr(pickle.loads(pickle.dumps(loaders[0]))) == "NeighborLoader()"
    assert "70 seeds" in loaders[0]._repr_html_()
    assert repr(torch_geometric.loader.DataLoader([data] * 2, 2)).startswith("DataLoader(2 graphs, ")


@pytest.mark.usefixtures("_installed")
def test_every_name_of_the_table_makes_ours():
    loader, sampler = torch_geometric.loader, torch_geometric.sampler
    data = make_data()
    made = [
        loader.LinkNeighborLoader(data, [2], batch_size=4, neg_sampling="binary"),
        loader.NodeLoader(data, sampler.NeighborSampler(data, [2]), batch_size=4),
        loader.LinkLoader(data, sampler.NeighborSampler(data, [2]), batch_size=4),
        loader.NeighborSampler(data.edge_index, [2], batch_size=4),
    ]

    rooms = {type(thing).__module__.partition(".")[0] for thing in [*made, sampler.NeighborSampler(data, [2])]}

    assert rooms == {"pyg_direct"}
    assert all(next(iter(thing)) is not None for thing in made)


@pytest.mark.usefixtures("_installed")
def test_signatures_are_those_of_pyg_where_a_program_reads_them():
    # As PyG's Lightning data modules do, to share out their options.
    class Mine(torch_geometric.loader.NeighborLoader):
        def __init__(self, data, *, mine=1):
            super().__init__(data, [2])

    read = {path: [*inspect.signature(original).parameters] for path, original in PYG.items()}

    assert read == {path: [*inspect.signature(kind.__init__).parameters][1:] for path, kind in PYG.items()}
    assert [*inspect.signature(Mine).parameters] == ["data", "mine"]


@pytest.mark.usefixtures("_installed")
def test_classes_of_both_answer_to_the_name():
    name = torch_geometric.loader.NeighborLoader
    loader = name(make_data(), [2])

    assert isinstance(loader, name)
    assert name is PYG["loader.NeighborLoader"]
    assert not isinstance(make_data(), name)


@pytest.mark.usefixtures("_installed")
def test_samplers_of_both_answer_to_the_name():
    name = torch_geometric.sampler.NeighborSampler

    assert isinstance(name(make_data(), [2]), name)
    assert not isinstance(make_data(), name)
    assert issubclass(name, torch_geometric.sampler.BaseSampler)


def call_default(data, kind=neighbor_loader.NeighborLoader):
    return kind(data, [2])


def test_every_name_that_a_program_had_before_makes_ours_until_it_is_given_back():
    table = {"neighbor": neighbor_loader.NeighborLoader}
    made = [call_default, lambda data: table["neighbor"](data, [2]), functools.partial(NAMED, num_neighbors=[2])]

    pyg_direct.install(device="cpu")
    pyg_direct.install(device="cpu")
    ours = {type(make(make_data())) for make in made}
    pyg_direct.uninstall()
    # PyG's own needs none of its libraries with a sampler.
    theirs = NAMED(make_data(), [2], neighbor_sampler=pyg_direct.sampler.NeighborSampler(make_data(), [2]))

    assert ours == {pyg_direct.NeighborLoader}
    assert type(theirs) is NAMED


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", ["NeighborSampler", "ShaDowKHopSampler"])
def test_deprecated_names_make_ours_and_say_so(name):
    kind, given = getattr(torch_geometric.data, name), make_data()
    with pytest.warns(UserWarning, match=f"'data.{name}' is deprecated, use 'loader.{name}'") as told:
        made = kind(given.edge_index, [2], batch_size=9) if name == "NeighborSampler" else kind(given, 2, 3)

    assert type(made) is getattr(pyg_direct.loader, name)
    assert isinstance(made, PYG[f"loader.{name}"])
    assert told[0].filename == __file__
    assert next(iter(made)) is not None


@pytest.mark.usefixtures("_installed")
def test_loaders_are_made_once(monkeypatch):
    init, asked = pyg_direct.NeighborLoader.__init__, []
    monkeypatch.setattr(
        pyg_direct.NeighborLoader,
        "__init__",
        functools.wraps(init)(lambda *args, **kwargs: asked.append(kwargs) or init(*args, **kwargs)),
    )

    loader = NAMED(make_data(), [2])

    assert len(asked) == 1
    assert type(loader) is type(copy.copy(loader)) is pyg_direct.NeighborLoader


@pytest.mark.usefixtures("_installed")
def test_samplers_that_pyg_makes_for_its_own_loaders_are_pygs(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("replace=True is not offered")

    monkeypatch.setattr(pyg_direct.NeighborLoader, "__init__", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = NAMED(make_data(), [2])

    assert type(loader) is NAMED
    assert type(loader.node_sampler) is PYG["sampler.NeighborSampler"]


def train_on_molecules(loader_class):
    """Losses of a program that trains on small graphs, and what torch's generator draws next."""
    torch.manual_seed(12)
    dataset = InMemory(make_molecules(40)).shuffle()
    train, test = loader_class(dataset[:30], batch_size=8, shuffle=True), loader_class(dataset[30:], batch_size=4)
    layer = torch.nn.Linear(1, 1)
    optimizer, losses = torch.optim.SGD(layer.parameters(), 0.01), []
    for _ in range(3):
        for batch in train:
            pooled = torch_geometric.nn.global_add_pool(layer(batch.x.float()), batch.batch)
            loss = (pooled.view(-1) - batch.y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        losses += [batch.y.sum().item() * batch.num_graphs for batch in test]
    return losses, torch.rand(1).item()


@pytest.mark.usefixtures("_installed")
def test_a_program_with_small_graphs_has_the_curve_that_it_has_with_pyg():
    loader_class = torch_geometric.loader.DataLoader
    assert type(loader_class(make_molecules(3))) is pyg_direct.DataLoader
    ours = train_on_molecules(loader_class)
    pyg_direct.uninstall()

    assert ours == train_on_molecules(loader_class)


@pytest.mark.usefixtures("_installed")
def test_graphs_without_a_length_are_left_to_pyg(said):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(make_molecules(5))

    loader = torch_geometric.loader.DataLoader(Stream(), batch_size=2)

    assert type(loader) is PYG["loader.DataLoader"]
    assert [batch.num_graphs for batch in loader] == [2, 2, 1]
    assert said.messages[0].startswith("DataLoader left to PyG: a data set without a length")


def test_what_is_replaced_and_left_is_said_once(said):
    pyg_direct.install(device="cpu")
    pyg_direct.install(device="cpu")
    pyg_direct.uninstall()

    assert len(said.messages) == 1
    assert len(f"pyg_direct: {said.messages[0]}") <= 120


def test_all_names_are_said_when_asked(said):
    pyg_direct.install(device="cpu", verbose=True)
    pyg_direct.uninstall()

    _, names, left = said.messages
    assert "loader.NeighborLoader" in names
    assert "loader.ClusterLoader" in names
    assert "utils.negative_sampling" in names
    assert "IBMBNodeLoader" in left
    assert "nn.TGNMemory" in names


@pytest.mark.usefixtures("_installed")
def test_loaders_that_have_none_of_ours_are_named_as_they_are_made(said, monkeypatch):
    kind = torch_geometric.loader.ibmb_loader.IBMBNodeLoader
    pyg_direct.uninstall()
    # It would compute PageRank.
    monkeypatch.setattr(kind, "__init__", lambda self, *args: None)
    plain = kind.__init__
    pyg_direct.install(device="cpu")
    said.clear()

    class Mine(kind):
        pass

    for made in (kind, kind, Mine):
        assert type(made(make_data(), [2])) is made

    assert said.messages == [f"{name} left to PyG: there is none of ours" for name in (kind.__name__, "Mine")]
    pyg_direct.uninstall()
    assert kind.__init__ is plain


# It only calls the loaders that it is given.
COMBINED = {torch_geometric.loader.ZipLoader}


def list_kinds(kind):
    """PyG's classes derived from a class, as far as they are imported."""
    for derived in kind.__subclasses__():
        if derived.__module__.startswith("torch_geometric.") and not derived.__name__.startswith("_"):
            yield derived
        yield from list_kinds(derived)


@pytest.mark.usefixtures("_installed")
def test_every_loader_of_pyg_is_ours_or_named_as_it_is_made():
    replaced = {entry.original for entry in REPLACEMENTS}

    # Objects of derived classes are named too, as those of the program's classes.
    left = [kind for kind in list_kinds(torch.utils.data.DataLoader)
            if not replaced & set(kind.__mro__) and kind not in COMBINED
            and not any(map(is_watched, [kind, *kind.__subclasses__()]))]  # fmt: skip

    assert left == []


@pytest.mark.usefixtures("_installed")
def test_classes_of_continuous_time_are_ours():
    models, loaders = torch_geometric.nn.models.tgn, torch_geometric.loader
    events = torch_geometric.data.TemporalData(src=torch.arange(4), dst=torch.arange(4), t=torch.arange(4))

    message, aggregator = models.IdentityMessage(1, 2, 2), models.LastAggregator()
    made = (loaders.TemporalDataLoader(events, batch_size=3), models.LastNeighborLoader(4, size=2),
            torch_geometric.nn.TGNMemory(4, 1, 2, 2, message, aggregator))  # fmt: skip

    assert [type(one) for one in made] == [
        pyg_direct.TemporalDataLoader, pyg_direct.LastNeighborLoader, pyg_direct.TGNMemory
    ]  # fmt: skip
    assert isinstance(made[1], models.LastNeighborLoader)
    assert next(iter(made[0])).n_id.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("_installed")
def test_loaders_around_others_are_ours_and_keep_the_device_of_the_program():
    inner = torch_geometric.loader.DenseDataLoader([make_data()] * 5, batch_size=2)
    ahead, kept = torch_geometric.loader.PrefetchLoader(inner), torch_geometric.loader.CachedLoader(inner)
    lists = torch_geometric.loader.DataListLoader([make_data()] * 5, batch_size=2)

    kinds = [type(loader).__name__ for loader in (inner, ahead, kept, lists)]
    assert kinds == ["DenseDataLoader", "PrefetchLoader", "CachedLoader", "DataListLoader"]
    assert all(type(loader) is getattr(pyg_direct, type(loader).__name__) for loader in (inner, ahead, kept, lists))
    # `install(device="cpu")` is for loaders that make batches.
    assert kept.device is None
    assert kept.transform is None
    assert len(list(ahead)) == len(list(kept)) == len(list(lists)) == 3


@pytest.mark.usefixtures("_installed")
def test_what_ours_does_not_offer_is_left_to_pyg_with_a_word(said, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("replace=True is not offered")

    monkeypatch.setattr(pyg_direct.NeighborLoader, "__init__", refuse)
    # With a sampler of its own PyG's loader needs none of its libraries.
    options = {"num_neighbors": [2], "neighbor_sampler": torch_geometric.sampler.NeighborSampler(make_data(), [2])}
    loaders = [torch_geometric.loader.NeighborLoader(make_data(), **options) for _ in range(2)]

    assert {type(loader) for loader in loaders} == {PYG["loader.NeighborLoader"]}
    assert isinstance(loaders[0], torch_geometric.loader.NeighborLoader)
    assert said.messages == ["NeighborLoader left to PyG: replace=True is not offered"]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", ["NeighborLoader", "LinkNeighborLoader"])
def test_rows_that_are_learned_carry_their_gradient(name):
    data = make_data()
    data.x = torch.nn.Parameter(data.x)
    loader = getattr(torch_geometric.loader, name)(data, [2], batch_size=70)
    assert type(loader) is getattr(pyg_direct, name)

    for batch in loader:
        # As PyG's programs write to what they learn.
        data.x.grad = None
        assert torch.equal(batch.x, data.x[batch.n_id])
        batch.x.sum().backward()
        assert data.x.grad.count_nonzero()
        data.x.data.add_(1)


@pytest.mark.usefixtures("_installed")
def test_loaders_of_sets_of_nodes_are_ours_with_the_signature_of_pygs():
    loader, data = torch_geometric.loader, make_data()

    # A node each, for which METIS is not asked.
    clusters = loader.ClusterData(data, num_parts=70, log=False)
    made = [
        clusters,
        loader.ClusterLoader(clusters, batch_size=2, shuffle=True, num_workers=2),
        loader.RandomNodeLoader(data, num_parts=3, shuffle=True),
        loader.RandomNodeLoader(make_hetero_data(), 3),
        loader.GraphSAINTNodeSampler(data, 5, 2, 1, None, False),
        loader.GraphSAINTEdgeSampler(data, batch_size=5, num_steps=2),
        loader.GraphSAINTRandomWalkSampler(data, 5, 2, 2, num_workers=4),
    ]

    for one in made:
        name = type(one).__name__
        assert type(one) is getattr(pyg_direct, name)
        assert isinstance(one, PYG[f"loader.{name}"])
        assert len(list(one)) == len(one)
    assert made[1].cluster_data is clusters


@pytest.mark.usefixtures("_installed")
def test_models_of_walks_are_ours_with_the_signature_of_pygs():
    edges, kind, options = make_data().edge_index, ("a", "to", "a"), {"batch_size": 16, "num_workers": 2}

    models = [
        torch_geometric.nn.Node2Vec(edges, embedding_dim=8, walk_length=5, context_size=3, p=0.5, sparse=True),
        torch_geometric.nn.MetaPath2Vec({kind: edges}, 8, [kind], walk_length=5, context_size=3),
    ]

    for model in models:
        name = type(model).__name__
        assert type(model) is getattr(pyg_direct, name)
        assert isinstance(model, PYG[f"nn.{name}"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = list(model.loader(**options))
        assert all(model.loss(*batch).requires_grad for batch in batches)
        assert type(copy.copy(model)) is type(model)


@pytest.mark.usefixtures("_installed")
def test_classes_that_draw_nodes_themselves_are_left_to_pyg_with_a_word(said):
    class Mine(torch_geometric.loader.GraphSAINTSampler):
        def __init__(self, data):
            self.data = data

    assert type(Mine(make_data())) is Mine
    assert said.messages == ["Mine left to PyG: it is a class of the program, derived from PyG's"]


def test_clusters_of_a_graph_are_where_the_graph_is():
    pyg_direct.install(device="data")
    clusters = torch_geometric.loader.ClusterData(make_data(), 70, log=False)
    made = torch_geometric.loader.ClusterLoader(clusters)
    pyg_direct.uninstall()

    assert made.device.type == "cpu"


@pytest.mark.usefixtures("_installed")
def test_pygs_hgt_sampler_is_ours():
    data = make_hetero_data()

    sampler = torch_geometric.sampler.HGTSampler(data, [40, 40])
    (batch,) = torch_geometric.loader.NodeLoader(data, sampler, ("a", torch.arange(5)), batch_size=5)

    assert isinstance(sampler, pyg_direct.sampler.HGTSampler)
    assert batch["a"].n_id[:5].tolist() == [0, 1, 2, 3, 4]
    for kind in data.edge_types:
        ends = [batch[end].n_id[row].tolist()
                for end, row in zip(kind[::2], batch[kind].edge_index, strict=True)]  # fmt: skip
        assert torch.equal(torch.tensor(ends), data[kind].edge_index[:, batch[kind].e_id]), kind


@pytest.mark.usefixtures("_installed")
def test_what_ours_does_not_offer_of_hgt_sampling_is_said(said):
    with pytest.raises((NotImplementedError, ImportError)):
        torch_geometric.sampler.HGTSampler(make_data(), [4])

    assert said.messages == ["HGTSampler left to PyG: data must be a HeteroData for HGT sampling, as in PyG, got Data: "
                             "NeighborLoader takes graphs without types"]  # fmt: skip


@pytest.mark.usefixtures("_installed")
def test_a_class_of_the_program_is_left_to_pyg(said):
    class Mine(torch_geometric.loader.NeighborLoader):
        pass

    sampler = torch_geometric.sampler.NeighborSampler(make_data(), [2])
    loader = Mine(make_data(), [2], neighbor_sampler=sampler)

    assert type(loader) is Mine
    assert isinstance(loader, torch_geometric.loader.NeighborLoader)
    assert len(said.messages) == 1
    assert said.messages[0].startswith("Mine left to PyG")


def call_with_negatives(edges, draw=torch_geometric.utils.negative_sampling):
    return draw(edge_index=edges, num_nodes=70, num_neg_samples=9)


def test_negatives_of_edges_on_a_gpu_are_ours_under_every_name(monkeypatch):
    functions = [torch_geometric.utils.negative_sampling, torch_geometric.utils.batched_negative_sampling]
    plain = [(one.__code__, one.__defaults__, inspect.signature(one)) for one in functions]
    monkeypatch.setattr(install, "_samples_on_gpu", lambda *args, **kwargs: True)
    edges, batch = GRAPH.edge_index, torch.zeros(70, dtype=torch.int64)

    pyg_direct.install(device="cpu")
    pyg_direct.install(device="cpu")
    signatures = [inspect.signature(one) for one in functions]
    ours = []
    for _ in range(2):
        torch.manual_seed(3)
        ours.append(
            [call_with_negatives(edges), functions[1](edges, batch), pickle.loads(pickle.dumps(functions[0]))(edges)]
        )
    made = next(line for line in program_record.describe_program() if line.startswith("replaced"))
    pyg_direct.uninstall()

    # PyG's own numbers follow Python's generator instead.
    assert all(torch.equal(first, again) for first, again in zip(*ours, strict=True))
    assert "negative_sampling (" in made
    assert signatures == [signature for _, _, signature in plain]
    assert plain == [(one.__code__, one.__defaults__, inspect.signature(one)) for one in functions]


def test_negatives_of_edges_on_a_cpu_are_pygs_own():
    random.seed(5)
    expected = call_with_negatives(GRAPH.edge_index)

    pyg_direct.install(device="cpu")
    random.seed(5)
    found = call_with_negatives(GRAPH.edge_index)
    pyg_direct.uninstall()

    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_negatives_on_a_gpu_are_drawn_there():
    pyg_direct.install()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(call_with_negatives(GRAPH.edge_index.cuda()))
    pyg_direct.uninstall()

    assert found[0].is_cuda
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on the second GPU."""

    is_cuda, device = True, torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("data", "device"),
    [(make_data(), "cpu"), (make_hetero_data(), "cpu"), ((None, None), "cpu"), (torch.zeros(2, 3), "cpu"),
     (Data(x=torch.zeros(3), edge_index=torch.zeros(2, 3).as_subclass(OnGpu)), torch.device("cuda", 1)),
     (torch.zeros(2, 3).as_subclass(OnGpu), torch.device("cuda", 1)),
     (make_molecules(2), "cpu"), ([], "cpu"), (torch.utils.data.Subset(InMemory(make_molecules(3)), [1]), "cpu"),
     ([Data(x=torch.zeros(3).as_subclass(OnGpu))], torch.device("cuda", 1)),
     (types.SimpleNamespace(is_cuda=lambda: True, device=lambda: "cuda:1"), "cuda:1")],
)  # fmt: skip
def test_loaders_may_be_where_their_data_is(data, device):
    class Loader:
        def __init__(self, data):
            pass

    class Ours(Loader):
        def __init__(self, data, device=None):
            self.device = device

    replace(Loader, StandIn(Ours, {"device": "data"}, verbose=False))
    try:
        made = Loader(data)
    finally:
        give_back()

    assert type(made) is Ours
    assert made.device == device


@pytest.mark.usefixtures("_installed")
def test_what_is_left_to_pyg_is_sent_to_processes_with_and_without_our_names():
    kinds = [PYG["sampler.NeighborSampler"], PYG["loader.NeighborLoader"]]
    pyg_direct.uninstall()
    sampler = kinds[0](make_data(), [2])
    made = [sampler, kinds[1](make_data(), [2], neighbor_sampler=sampler, batch_size=7)]
    pyg_direct.install(device="cpu")
    sent = pickle.dumps(made)

    got = pickle.loads(sent)
    pyg_direct.uninstall()
    without = pickle.loads(sent)

    for things in (got, without):
        assert [type(thing) for thing in things] == kinds
        assert things[1].batch_size == 7
        assert things[1].node_sampler is things[0]
    assert [type(thing) for thing in pickle.loads(pickle.dumps(got))] == kinds
    assert type(copy.copy(sampler)) is kinds[0]
    assert b"pyg_direct" not in sent


@pytest.mark.usefixtures("_installed")
def test_bad_arguments_are_refused_as_ours_are():
    with pytest.raises(pyg_direct.errors.ArgumentError, match="num_neighbors"):
        torch_geometric.loader.NeighborLoader(make_data(), [-3])


@pytest.mark.usefixtures("_installed")
def test_workers_are_no_matter():
    loader = torch_geometric.loader.NeighborLoader(make_data(), [2], batch_size=35, num_workers=4,
                                                   persistent_workers=True)  # fmt: skip

    with loader.enable_cpu_affinity([0]), loader.enable_multithreading(1):
        assert len(list(loader)) == 2


@pytest.mark.usefixtures("_installed")
def test_the_programs_transform_sees_ids_and_has_the_last_word():
    def transform(batch):
        batch.rows = torch.arange(70)[batch.n_id]
        return batch

    loader = torch_geometric.loader.NeighborLoader(make_data(), [2], batch_size=35, transform=transform)

    assert all(torch.equal(batch.rows, batch.y) for batch in loader)


@pytest.mark.usefixtures("_installed")
def test_inference_by_layers_runs_as_it_is():
    data, model = make_data(), GraphSAGE(3, 8, 2).eval()

    got = model.inference(torch_geometric.loader.NeighborLoader(data, [-1], batch_size=16))

    assert torch.allclose(got, model(data.x, data.edge_index), atol=1e-5)


@pytest.mark.gpu
def test_on_the_gpu_ids_index_tensors_on_the_host():
    pyg_direct.install()
    try:
        data, model = make_data(), GraphSAGE(3, 8, 2).eval()
        x = data.x.clone()
        loader = torch_geometric.loader.NeighborLoader(data, [-1], batch_size=16)
        batch = next(iter(loader))
        got = model.cuda().inference(loader, device="cuda")
    finally:
        pyg_direct.uninstall()

    assert batch.x.is_cuda
    assert torch.equal(x[batch.n_id], batch.x.cpu())
    assert torch.allclose(got, model.cpu()(x, GRAPH.edge_index), atol=1e-4)


@pytest.mark.usefixtures("_installed")
def test_samplers_are_copied_and_changed_as_lightning_does():
    data = make_hetero_data()
    sampler = torch_geometric.sampler.NeighborSampler(data, [2], share_memory=False)
    other = copy.copy(sampler)

    other.num_neighbors = [-1]
    loaders = [torch_geometric.loader.NodeLoader(data, each, ("a", None), batch_size=70) for each in (sampler, other)]
    counts = [next(iter(loader))["b", "back", "a"].edge_index.shape[1] for loader in loaders]

    assert counts[0] < counts[1] == 600


def test_a_place_that_there_is_not_is_refused_and_nothing_replaced():
    with pytest.raises(pyg_direct.errors.ArgumentError, match="placement must be one of"):
        pyg_direct.install(placement="nowhere")

    assert BasicGNN.inference.__module__.startswith("torch_geometric")


@pytest.mark.usefixtures("_installed")
def test_inference_of_models_is_ours_where_the_loader_is(monkeypatch):
    data = Data(x=torch.randn(30, 4), edge_index=torch.randint(30, (2, 90)))
    model = GraphSAGE(4, 8, 2, 3).eval()
    loader = torch_geometric.loader.NeighborLoader(data, [-1], batch_size=7)
    expected = BasicGNN.inference.__wrapped__(model, loader)
    asked = []
    monkeypatch.setattr(install, "infer", lambda *args, **kwargs: asked.append(args) or infer(*args, **kwargs))

    got = model.inference(loader)
    few = torch_geometric.loader.NeighborLoader(data, [-1], batch_size=7, transform=lambda batch: batch)

    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.inference(few), expected)
    assert len(asked) == 1


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("case", ["some nodes", "fanouts"])
def test_inference_that_ours_does_not_offer_is_left_to_pyg(monkeypatch, case):
    data = Data(x=torch.randn(30, 4), edge_index=torch.randint(30, (2, 90)))
    model = GraphSAGE(4, 8, 2, 3).eval()
    nodes = torch.arange(30).flip(0) if case == "some nodes" else None
    fanouts = [5] if case == "fanouts" else [-1]
    loader = torch_geometric.loader.NeighborLoader(data, fanouts, nodes, batch_size=30)
    monkeypatch.setattr(install, "infer", lambda *args, **kwargs: pytest.fail("ours"))
    asked = []
    monkeypatch.setattr(BasicGNN, "inference_per_layer", lambda *args: asked.append(args) or torch.zeros(30, 3))

    model.inference(loader)

    assert asked


@pytest.mark.usefixtures("_installed")
def test_a_class_of_the_program_answers_for_itself():
    class Mine(torch_geometric.loader.NeighborLoader):
        pass

    loader = torch_geometric.loader.NeighborLoader(make_data(), [2])

    assert not isinstance(loader, Mine)
    assert not issubclass(torch_geometric.loader.NeighborLoader, Mine)
    assert issubclass(Mine, torch_geometric.loader.NeighborLoader)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("jk", "training"), [("cat", False), (None, True)])
def test_models_that_have_no_such_inference_hear_it_from_pyg(monkeypatch, jk, training):
    model = GraphSAGE(4, 8, 2, 3, jk=jk).train(training)
    loader = torch_geometric.loader.NeighborLoader(make_data(), [-1])
    monkeypatch.setattr(install, "infer", lambda *args, **kwargs: pytest.fail("ours"))

    with pytest.raises(AssertionError):
        model.inference(loader)
