"""`Node2Vec` and `MetaPath2Vec` have PyG's weights, windows and losses; their walks go along edges."""

import copy
import io
import pickle
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch_geometric.nn as pyg_nn
from torch_geometric.data import Data

from pyg_direct import CSRTopo, MetaPath2Vec, Node2Vec, random_walk
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.loader.walk_models import WalkLoader
from pyg_direct.sampling.random_key import batch_key

EDGES = torch.randint(20, (2, 90), generator=torch.Generator().manual_seed(1))
SIZES = {"a": 12, "b": 9}
TYPED = {("a", "to", "b"): torch.stack([torch.arange(40) % 11, torch.arange(40) * 7 % 9]),
         ("b", "back", "a"): torch.stack([torch.arange(40) % 9, torch.arange(40) * 5 % 12])}  # fmt: skip
METAPATH = list(TYPED)


def make_node2vec(**options):
    return Node2Vec(
        **{
            "edge_index": EDGES,
            "embedding_dim": 4,
            "walk_length": 6,
            "context_size": 3,
            "walks_per_node": 2,
            "num_negative_samples": 3,
            "num_nodes": 22,
            "device": "cpu",
            **options,
        }
    )


def make_metapath2vec(**options):
    return MetaPath2Vec(
        **{
            "edge_index_dict": TYPED,
            "embedding_dim": 4,
            "metapath": METAPATH,
            "walk_length": 5,
            "context_size": 3,
            "walks_per_node": 2,
            "num_negative_samples": 3,
            "num_nodes_dict": SIZES,
            "device": "cpu",
            **options,
        }
    )


MODELS = {"node2vec": make_node2vec, "metapath2vec": make_metapath2vec}
models = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MODELS.items()])


def list_batches(loader):
    return [(positive.tolist(), negative.tolist()) for positive, negative in loader]


def is_step(source, target):
    return bool(((EDGES[0] == source) & (EDGES[1] == target)).any())


def test_windows_of_node2vec_are_cut_out_of_random_walks(real_device):
    model = make_node2vec(p=0.5, q=2.0)

    (batch,) = model.loader(batch_size=22, seed=3, device=real_device)

    positive, negative = (part.cpu() for part in batch)
    rows = CSRTopo(EDGES, num_nodes=22, direction="out")
    walks = random_walk(rows, torch.arange(22).repeat(2), 5, 0.5, 2.0, seed=batch_key(3, 0, 0), device="cpu")
    windows = torch.cat([walks[:, begin : begin + 3] for begin in range(4)])
    assert torch.equal(positive, windows)
    has_edges = set(EDGES[0].tolist())
    for window in positive.tolist():
        for source, target in pairwise(window):
            assert is_step(source, target) if source in has_edges else target == source
    assert negative.shape == (4 * 22 * 2 * 3, 3)
    assert torch.equal(negative[: 22 * 6, 0], torch.arange(22).repeat(6))
    assert set(negative.unique().tolist()) == set(range(22))


def test_walks_of_one_node_are_their_nodes(real_device):
    model = make_node2vec(walk_length=1, context_size=1)

    (batch,) = model.loader(batch_size=22, seed=3, device=real_device)

    assert [part.view(-1).tolist() for part in batch] == [[*range(22)] * 2, [*range(22)] * 6]


def test_windows_of_metapath2vec_follow_the_metapath(real_device):
    model = make_metapath2vec()

    (batch,) = model.loader(batch_size=12, seed=3, device=real_device)

    positive, negative = (part.cpu() for part in batch)
    assert positive.shape == (4 * 12 * 2, 3)
    assert negative.shape == (4 * 12 * 2 * 3, 3)
    # Windows begin at a, b, a, b: ids of b stand behind those of a, and the dummy behind all.
    for number, window in enumerate(positive.tolist()):
        kinds = "abab"[number // 24 % 2 :][:3]
        for (source, target), (begin, end) in zip(pairwise(window), pairwise(kinds), strict=True):
            if source == 21 or target == 21:
                assert target == 21
                continue
            relation = TYPED[METAPATH[0] if begin == "a" else METAPATH[1]]
            own = source - (12 if begin == "b" else 0), target - (12 if end == "b" else 0)
            assert bool(((relation[0] == own[0]) & (relation[1] == own[1])).any())
    is_second = torch.arange(negative.shape[0]) // 72 % 2 == 1
    in_a = negative < 12
    assert bool((in_a[~is_second] == torch.tensor([True, False, True])).all())
    assert bool((in_a[is_second] == torch.tensor([False, True, False])).all())
    assert int(negative.max()) == 20
    assert int((positive == 21).sum()) > 0


@models
def test_epochs_are_functions_of_the_seed_on_every_device(real_device, make):
    loader = make().loader(batch_size=5, shuffle=True, seed=7, device=real_device)

    epochs = [list_batches(loader) for _ in range(2)]

    assert isinstance(loader, WalkLoader)
    assert len(loader) == len(epochs[0]) == -(-(22 if make is make_node2vec else 12) // 5)
    assert list_batches(make(seed=7).loader(batch_size=5, shuffle=True, prefetch=0)) == epochs[0]
    assert epochs[0] != epochs[1]


@models
def test_an_epoch_goes_on_where_its_state_was_taken_also_in_another_process(make):
    loader = make(seed=7).loader(batch_size=4, shuffle=True)
    whole = list_batches(loader)
    loader.load_state_dict({"seed": 7, "epoch": 0, "batch": 0})
    batches = iter(loader)
    next(batches)

    sent = pickle.loads(pickle.dumps(loader))
    sent.load_state_dict(loader.state_dict())

    assert list_batches(sent) == whole[1:]


@models
def test_without_a_seed_epochs_follow_torch(make):
    model = make()

    def draw():
        torch.manual_seed(2)
        return list_batches(model.loader(batch_size=9, shuffle=True))

    assert draw() == draw()


def test_metapath2vec_has_pygs_weights_and_losses():
    options = {"edge_index_dict": TYPED, "embedding_dim": 4, "metapath": METAPATH, "walk_length": 5, "context_size": 3,
               "num_nodes_dict": SIZES}  # fmt: skip
    torch.manual_seed(0)
    theirs = pyg_nn.MetaPath2Vec(**options)
    torch.manual_seed(0)
    ours = MetaPath2Vec(**options)

    assert isinstance(ours, pyg_nn.MetaPath2Vec)
    assert torch.equal(ours.embedding.weight, theirs.embedding.weight)
    walks = next(iter(ours.loader(batch_size=12, device="cpu")))
    assert torch.equal(ours.loss(*walks), theirs.loss(*walks))
    for own, other in zip(ours._sample([1, 2]), theirs._sample([1, 2]), strict=True):
        assert own.shape == other.shape


def test_node2vec_is_pygs_model():
    torch.manual_seed(0)
    model = make_node2vec()

    assert isinstance(model, pyg_nn.Node2Vec)
    assert str(model) == "Node2Vec(22, 4)"
    assert torch.equal(model(torch.tensor([3])), model.embedding.weight[3:4])
    positive, negative = model.sample([1, 2, 3])
    assert positive.shape == (4 * 3 * 2, 3)
    assert negative.shape == (4 * 3 * 2 * 3, 3)
    assert model.loss(positive, negative).requires_grad
    for window in positive.tolist():
        assert all(is_step(source, target) for source, target in pairwise(window) if source in set(EDGES[0].tolist()))


def test_training_brings_neighbors_together():
    # Two cliques: skip-gram tells them apart.
    pairs = [(a, b) for begin in (0, 6) for a in range(begin, begin + 6) for b in range(begin, begin + 6) if a != b]
    torch.manual_seed(1)
    model = Node2Vec(torch.tensor(pairs).t(), 8, 6, 4, walks_per_node=5, device="cpu", seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    loader = model.loader(batch_size=4, shuffle=True)

    for _ in range(30):
        for positive, negative in loader:
            optimizer.zero_grad()
            model.loss(positive, negative).backward()
            optimizer.step()

    near = torch.nn.functional.normalize(model().detach(), dim=1)
    near = near @ near.t()
    assert near[:6, :6].mean() > near[:6, 6:].mean() + 0.3


OWN = {"node2vec": ("pos_sample", "neg_sample", "sample"),
       "metapath2vec": ("_pos_sample", "_neg_sample", "_sample")}  # fmt: skip


@pytest.mark.parametrize(("name", "hook"), [(name, hook) for name, hooks in OWN.items() for hook in hooks])
@pytest.mark.parametrize("way", ["class", "object"])
def test_methods_of_a_program_draw_the_walks_and_follow_the_seed(name, hook, way):
    model, called = MODELS[name](seed=1), []
    kind = type(model)

    def own(self, batch):
        called.append(len(batch))
        return getattr(kind, hook)(self, batch)

    if way == "class":
        model.__class__ = type("Mine", (kind,), {hook: own})
    else:
        setattr(model, hook, partial(own, model))
    first, second = (list_batches(model.loader(batch_size=7, prefetch=prefetch)) for prefetch in (0, 2))

    sizes = [len(batch) for batch in torch.arange(model.loader()._nodes.numel()).split(7)]
    assert called == sizes * 2
    assert first == second
    # Positive walks are drawn first, under the key of the batch itself.
    assert [pair[0] for pair in first] == [pair[0] for pair in list_batches(MODELS[name](seed=1).loader(batch_size=7))]


def test_negative_walks_by_hand_follow_the_seed():
    for make, hook in ((make_node2vec, "neg_sample"), (make_metapath2vec, "_neg_sample")):
        walks = [getattr(make(seed=seed), hook)(torch.arange(4)) for seed in (1, 1, 2)]

        assert walks[0].shape[1] == 3
        assert torch.equal(walks[0], walks[1])
        assert not torch.equal(walks[0], walks[2])


def test_offsets_that_a_program_writes_are_refused():
    model = make_node2vec()
    list(model.loader(batch_size=7))

    model.rowptr.numpy()[3:] = 10**9

    with pytest.raises(ArgumentError, match="indptr must run from 0 to the number of edges 90"):
        list(model.loader(batch_size=7))


@models
def test_models_are_copied_and_saved_without_what_was_placed(make):
    model = make(seed=1)
    expected = list_batches(model.loader(batch_size=7))

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._opened == {}
        assert list_batches(other.loader(batch_size=7)) == expected
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    make().load_state_dict(torch.load(file))


@models
def test_loaders_tell_of_their_batches(real_device, make):
    loader = make().loader(batch_size=4, device=real_device)
    loader.record()
    num_batches = sum(1 for _ in loader)

    report = loader.report()

    assert report.num_batches == num_batches
    assert str(report).startswith("topology: ")


@models
def test_bad_options_of_loaders_are_named(make):
    for options, error, words in (
        ({"batch": 3}, ArgumentTypeError, "has no option batch"),
        ({"prefetch": -1}, ArgumentError, "prefetch must be"),
        ({"device": "tpu"}, ArgumentError, "device"),
        ({"filter_per_worker": True}, ArgumentTypeError, "has no option filter_per_worker"),
    ):
        with pytest.raises(error, match=words):
            make().loader(**options)


COUNTS = [({name: 0}, ArgumentError, f"{name} must be an integer of at least 1, got 0")
          for name in ("embedding_dim", "context_size", "walks_per_node", "num_negative_samples")]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), [
    *COUNTS,
    ({"edge_index": EDGES.t()}, ArgumentError, r"edge_index must have shape \[2, E\]"),
    ({"num_nodes": 5}, IdError, r"edge_index must lie in \[0, 5\)"),
    ({"num_nodes": 0}, ArgumentError, "num_nodes must be an integer of at least 1, got 0"),
    ({"walk_length": 2}, ArgumentError, "walk_length must be at least context_size=3, got 2"),
    ({"p": 0}, ArgumentError, "p must be finite and above 0, got 0"),
    ({"q": "a"}, ArgumentTypeError, "q must be a number, got 'a'"),
    ({"sparse": 3}, ArgumentTypeError, "sparse must be True or False"),
    ({"seed": "a"}, ArgumentTypeError, "seed must be an integer or None"),
    ({"edge_index": Data(edge_index=EDGES)}, ArgumentTypeError, r"edge_index must be a tensor \[2, E\], got Data"),
])  # fmt: skip
def test_bad_arguments_of_node2vec_are_named(options, error, words):
    with pytest.raises(error, match=words):
        make_node2vec(**options)


@pytest.mark.parametrize(("options", "error", "words"), [
    *COUNTS,
    ({"num_nodes_dict": {"a": 12, "b": 3}}, IdError, r"edge_index_dict\[.*\] must lie in \[0, 3\)"),
    ({"metapath": [("a", "to", "a")]}, ArgumentError, "metapath must have relations of edge_index_dict, got"),
    ({"metapath": []}, ArgumentError, "metapath must have relations of edge_index_dict, got"),
    ({"metapath": METAPATH[:1] * 2}, ValueError, "Found invalid metapath"),
    ({"walk_length": 1}, ArgumentError, "walk_length must be at least context_size=3 less 1, got 1"),
    ({"sparse": 3}, ArgumentTypeError, "sparse must be True or False"),
    ({"edge_index_dict": {key: [[0], [1]] for key in TYPED}}, ArgumentTypeError, "must be a tensor .*, got list"),
])  # fmt: skip
def test_bad_arguments_of_metapath2vec_are_named(options, error, words):
    with pytest.raises(error, match=words):
        make_metapath2vec(**options)


@pytest.mark.parametrize("batch", [[22], [-1], [0.5]])
def test_nodes_that_are_none_are_refused(batch):
    with pytest.raises((IdError, ArgumentTypeError), match="batch"):
        make_node2vec().pos_sample(torch.tensor(batch))
