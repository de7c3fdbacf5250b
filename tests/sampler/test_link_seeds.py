"""Links as seeds: fields and their places as in PyG, negatives by key, strict ones, targets left out of the batch."""

import math

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader as PygLinkLoader, LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling
from torch_geometric.transforms import RandomLinkSplit

from pyg_direct import LinkLoader, LinkNeighborLoader, NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning
from pyg_direct.sampler import NeighborSampler
from pyg_direct.sampling.negative_links import EdgeSet
from tests.batches import assert_equal_batches, make_data
from tests.hetero_data import check_rows, make_hetero, name_edges
from tests.reference.draw import batch_key
from tests.reference.negative import draw_negatives

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def make_links(count=23, num_sources=70, num_targets=70, seed=3):
    """Pairs, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(0, size, (count,), generator=generator) for size in (num_sources, num_targets)]
    return torch.stack(ends)


@pytest.mark.sparse
@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("ratio", [None, 1.0, 0.5, 2.5])
def test_labels_stand_where_pyg_puts_them(real_device, ratio, shape):
    data, links = make_data(), make_links()
    labels = torch.arange(math.prod((23, *shape))).view(23, *shape) % 4
    options = {"edge_label_index": links, "edge_label": labels, "neg_sampling_ratio": ratio, "batch_size": 10}

    batches = list(LinkNeighborLoader(data, [3], **options, device=real_device))

    for batch, other in zip(batches, PygLinkNeighborLoader(data, [3], **options), strict=True):
        counts = {"num_sampled_nodes", "num_sampled_edges"}
        assert set(batch.keys()) - counts == set(other.keys()) - counts
        assert torch.equal(batch.edge_label.cpu(), other.edge_label)
        assert batch.edge_label.dtype == other.edge_label.dtype
        assert batch.edge_label_index.shape == other.edge_label_index.shape
        assert torch.equal(batch.input_id.cpu(), other.input_id)
        positive = batch.edge_label_index[:, : batch.input_id.numel()]
        assert torch.equal(batch.n_id[positive].cpu(), links[:, batch.input_id.cpu()])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
        assert batch.edge_label.device.type == batch.edge_label_index.device.type == real_device.type


@pytest.mark.parametrize("temporal", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("amount", [1, 3])
@pytest.mark.parametrize("edge_type", [None, CITES, WRITES])
def test_triplets_stand_where_pyg_puts_them(real_device, edge_type, amount, disjoint, temporal):
    if edge_type is None:
        data, links = make_data(time=torch.arange(70) % 9), make_links()
    else:
        data, links = make_hetero(), make_links(23, {WRITES: 25, CITES: 40}[edge_type], 40)
        data["paper"].time, data["author"].time = torch.arange(40) % 9, torch.arange(25) % 9
    times = {"time_attr": "time", "edge_label_time": torch.arange(23) % 7 + 8} if temporal else {}
    given = links if edge_type is None else (edge_type, links)

    batches = list(LinkNeighborLoader(data, [2, 2], given, neg_sampling={"mode": "triplet", "amount": amount},
                                      batch_size=10, disjoint=disjoint, shuffle=True, device=real_device, **times)
                   )  # fmt: skip

    for batch in batches:
        part, source, target = ((batch, batch, batch) if edge_type is None else
                                (batch[edge_type], batch[edge_type[0]], batch[edge_type[2]]))  # fmt: skip
        count = part.input_id.numel()
        assert target.dst_neg_index.shape == ((count,) if amount == 1 else (count, amount))
        assert source.n_id[source.src_index].tolist() == links[0, part.input_id].tolist()
        assert target.n_id[target.dst_pos_index].tolist() == links[1, part.input_id].tolist()
        assert "edge_label" not in part
        assert "edge_label_index" not in part
        if disjoint or temporal:
            begin = 0 if edge_type == WRITES else count
            assert source.src_index.tolist() == list(range(count))
            assert target.dst_pos_index.tolist() == list(range(begin, begin + count))
            negatives = target.dst_neg_index.view(count, amount).t().reshape(-1)
            assert negatives.tolist() == list(range(begin + count, begin + count * (amount + 1)))
            num_seeds = begin + count * (amount + 1)
            assert target.batch[:num_seeds].tolist() == list(range(count)) * (num_seeds // count)
        if temporal:
            assert source.seed_time.tolist() == (torch.arange(23) % 7 + 8)[part.input_id].tolist()
            for end in (source, target):
                assert bool((end.time <= end.seed_time[end.batch]).all())


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_times_of_binary_links_are_kept_by_their_negatives(real_device, ratio):
    data, links = make_hetero(), make_links(24, 25, 40)
    data["paper"].time, data["author"].time = torch.arange(40) % 9, torch.arange(25) % 9
    times = torch.arange(24) % 7 + 8

    batches = list(LinkNeighborLoader(data, [2, 2], (WRITES, links), edge_label_time=times, time_attr="time",
                                      neg_sampling_ratio=ratio, batch_size=8, device=real_device))  # fmt: skip

    for batch in batches:
        part = batch[WRITES]
        own = times[part.input_id]
        assert part.edge_label_time.tolist() == [*own.tolist(), *own[: int(8 * ratio)].tolist()]
        assert part.edge_label.tolist() == [1.0] * 8 + [0.0] * int(8 * ratio)
        for kind in ("author", "paper"):
            assert bool((batch[kind].time.cpu() <= own[batch[kind].batch.cpu()]).all())
        # Both ends of a negative belong to the link whose time they have.
        ends = [batch[kind].batch[part.edge_label_index[end]].tolist() for end, kind in enumerate(("author", "paper"))]
        assert ends[0] == ends[1] == [*range(8), *range(int(8 * ratio))]


def test_negatives_are_those_of_the_reference_under_the_key_of_the_batch(real_device):
    data, links = make_data(), make_links(20)

    batches = list(LinkNeighborLoader(data, [2], links, neg_sampling="binary", batch_size=10, seed=6,
                                      device=real_device))  # fmt: skip

    for number, batch in enumerate(batches):
        drawn = batch.n_id[batch.edge_label_index[:, 10:]].t().tolist()
        assert [tuple(pair) for pair in drawn] == draw_negatives(10, batch_key(6, 0, number), 70, 70)


def test_weights_choose_negatives(real_device):
    weight = (torch.arange(70) % 5 == 2).float()
    sampling = NegativeSampling("triplet", 4, dst_weight=weight)

    for batch in LinkNeighborLoader(make_data(), [2], make_links(), neg_sampling=sampling, device=real_device):
        assert bool((batch.n_id[batch.dst_neg_index] % 5 == 2).all())


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_strict_negatives_are_no_edges(real_device, mode):
    data, links = make_hetero(), make_links(20, 25, 40)
    edges = set(map(tuple, data[WRITES].edge_index.t().tolist()))

    batches = list(LinkNeighborLoader(data, [2], (WRITES, links), neg_sampling={"mode": mode, "amount": 5},
                                      strict_negatives=True, batch_size=10, device=real_device))  # fmt: skip

    for batch in batches:
        if mode == "binary":
            source, target = batch[WRITES].edge_label_index[:, 10:]
        else:
            target = batch["paper"].dst_neg_index.reshape(-1)
            source = batch["author"].src_index.repeat_interleave(5)
        pairs = zip(batch["author"].n_id[source].tolist(), batch["paper"].n_id[target].tolist(), strict=True)
        assert edges.isdisjoint(pairs)


def test_what_strict_negatives_avoid_is_joined_once_whoever_draws_them(real_device, monkeypatch):
    class Evens(NegativeSampling):
        def sample(self, num_samples, endpoint, num_nodes=None):
            return 2 * torch.randint(num_nodes // 2, (num_samples,))

    joined, join = [], EdgeSet.with_links
    monkeypatch.setattr(EdgeSet, "with_links", lambda *args, **kwargs: joined.append(args) or join(*args, **kwargs))

    batches = list(LinkNeighborLoader(make_data(), [2], make_links(), neg_sampling=Evens("binary"), batch_size=5,
                                      strict_negatives=True, device=real_device))  # fmt: skip

    assert len(batches) == 5
    assert len(joined) == 1


def test_it_says_when_there_is_no_strict_negative(real_device):
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5)).t().contiguous()
    loader = LinkNeighborLoader(Data(edge_index=every, num_nodes=5), [2], neg_sampling="binary", strict_negatives=True,
                                batch_size=25, prefetch=0, device=real_device)  # fmt: skip

    with pytest.warns(LoaderWarning, match="25 of 25 negatives of a batch are edges or positive links, as 32 draws"):
        list(loader)


def name_negatives(batch, edge_type, mode):
    """(source, target) of each negative, by id."""
    part, source, target = (batch, batch, batch) if edge_type is None else (batch[kind] for kind in (
        edge_type, edge_type[0], edge_type[2]))  # fmt: skip
    if mode == "triplet":
        negatives = target.dst_neg_index.view(len(source.src_index), -1)
        ends = source.src_index.repeat_interleave(negatives.shape[1]), negatives.reshape(-1)
    else:
        ends = part.edge_label_index[:, len(part.input_id) :]
    return list(zip(source.n_id[ends[0]].tolist(), target.n_id[ends[1]].tolist(), strict=True))


def make_one_negative_each(num_sources=4, num_targets=12):
    """(edges, held-out links, the one other target of each source)."""
    pairs = torch.cartesian_prod(torch.arange(num_sources), torch.arange(num_targets)).t()
    is_edge, is_free = pairs[1] < 4, pairs[1] == 11 - pairs[0]
    return pairs[:, is_edge], pairs[:, ~is_edge & ~is_free], {(source, 11 - source) for source in range(num_sources)}


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@pytest.mark.parametrize("edge_type", [None, WRITES])
def test_strict_negatives_are_no_links_that_are_held_out(real_device, edge_type, mode):
    edges, links, free = make_one_negative_each()
    data, given = Data(edge_index=edges, num_nodes=12), links
    if edge_type is not None:
        data, given = HeteroData({"author": {"num_nodes": 4}, "paper": {"num_nodes": 12}}), (WRITES, links)
        data[WRITES].edge_index = edges
    weight = torch.zeros(4 if edge_type else 12).index_fill_(0, torch.arange(4), 1.0)
    sampling = NegativeSampling(mode, 2, src_weight=None if mode == "triplet" else weight)
    loader = LinkNeighborLoader(data, [2], given, neg_sampling=sampling, strict_negatives=True, batch_size=7, seed=2,
                                device=real_device)  # fmt: skip

    with pytest.warns(LoaderWarning, match="edges or positive links"):
        batches = [*loader, loader(torch.arange(9))]

    pairs = [pair for batch in batches for pair in name_negatives(batch, edge_type, mode)]
    # A source has one target left; within 32 draws of twelve it is met fifteen times of sixteen.
    assert sum(pair in free for pair in pairs) > 0.8 * len(pairs)


def split_undirected(edge_type):
    """(a graph with half of the edges of an undirected one, the others as pairs, each once, all of them)."""
    pairs = torch.combinations(torch.arange(12)).t()
    pairs = pairs[:, torch.randperm(66, generator=torch.Generator().manual_seed(4))[:40]]
    data = Data(edge_index=torch.cat([pairs, pairs.flip(0)], 1), num_nodes=12)
    if edge_type is not None:
        data = HeteroData({"paper": {"num_nodes": 12}, edge_type: {"edge_index": data.edge_index}})
    split = RandomLinkSplit(num_val=0.5, num_test=0.0, is_undirected=True, add_negative_train_samples=False,
                            neg_sampling_ratio=0.0, edge_types=edge_type)  # fmt: skip
    train, held_out, _ = split(data)
    return train, (held_out if edge_type is None else held_out[edge_type]).edge_label_index, pairs


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@pytest.mark.parametrize("edge_type", [None, CITES])
def test_a_link_of_an_undirected_graph_is_no_strict_negative_turned_round(real_device, edge_type, mode):
    data, links, pairs = split_undirected(edge_type)
    every = {*map(tuple, pairs.t().tolist()), *map(tuple, pairs.flip(0).t().tolist())}
    given = links if edge_type is None else (edge_type, links)
    sampling = {"mode": mode, "amount": 9}

    batches = list(LinkNeighborLoader(data, [2], given, neg_sampling=sampling, strict_negatives=True, seed=2,
                                      batch_size=10, device=real_device))  # fmt: skip

    assert links.shape == (2, 20)
    for number, batch in enumerate(batches):
        found = name_negatives(batch, edge_type, mode)
        assert every.isdisjoint(found)
        if mode == "binary":
            assert found == draw_negatives(90, batch_key(2, 0, number), 12, 12, edges=every)


@pytest.mark.parametrize("edges", [[], [(10, 11), (11, 10), (11, 9), (9, 9)]], ids=["no edges", "one goes one way"])
def test_a_link_of_a_directed_graph_may_be_a_strict_negative_turned_round(real_device, edges):
    links = torch.combinations(torch.arange(10)).t()
    data = Data(edge_index=torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous(), num_nodes=12)

    (batch,) = LinkNeighborLoader(data, [2], links, neg_sampling="binary", strict_negatives=True, batch_size=45, seed=2,
                                  device=real_device)  # fmt: skip

    avoided = {*edges, *map(tuple, links.t().tolist())}
    found = name_negatives(batch, None, "binary")
    assert found == draw_negatives(45, batch_key(2, 0, 0), 12, 12, edges=avoided)
    assert set(map(tuple, links.flip(0).t().tolist())) & set(found)


def test_links_of_a_relation_that_the_graph_lacks_are_no_strict_negatives(real_device):
    data = HeteroData({"author": {"num_nodes": 6}, "paper": {"num_nodes": 6}})
    kind, links = ("author", "will_write", "paper"), make_links(20, 6, 6)

    for batch in LinkNeighborLoader(data, {}, (kind, links), neg_sampling="binary", strict_negatives=True,
                                    batch_size=5, device=real_device):  # fmt: skip
        assert set(map(tuple, links.t().tolist())).isdisjoint(name_negatives(batch, kind, "binary"))


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 2], [0, 0]], ids=["told", "classes", "one class"])
def test_a_pair_that_is_labeled_negative_may_be_drawn(real_device, labels):
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5)).t().contiguous()
    told = torch.tensor(labels).repeat(25)[:25]
    loader = LinkNeighborLoader(Data(num_nodes=5, edge_index=every[:, :0]), [1], every, told, batch_size=25,
                                neg_sampling="binary", strict_negatives=True, device=real_device)  # fmt: skip

    if labels != [0, 1]:
        with pytest.warns(LoaderWarning, match="25 of 25 negatives of a batch are edges or positive links"):
            list(loader)
        return
    (batch,) = loader
    assert set(name_negatives(batch, None, "binary")) <= set(map(tuple, every[:, told == 0].t().tolist()))


@pytest.mark.parametrize("label", [None, torch.arange(12) % 2], ids=["links", "labels"])
def test_strict_negatives_of_a_sampler_are_no_links_of_the_batch(real_device, label):
    sources, targets = torch.arange(12) % 3, torch.arange(12) // 3
    sampler = NeighborSampler(Data(num_nodes=5, edge_index=torch.empty(2, 0).long()), [1], device=real_device,
                              strict_negatives=True)  # fmt: skip
    index = EdgeSamplerInput(None, sources, targets, label=label)

    out = sampler.sample_from_edges(index, NegativeSampling("binary", 9), key=1)

    pairs = set(zip(*(out.node[out.metadata[1][:, 12:]].tolist()), strict=True))
    avoided = set(zip(sources.tolist(), targets.tolist(), strict=True) if label is None else
                  zip(sources[1::2].tolist(), targets[1::2].tolist(), strict=True))  # fmt: skip
    assert avoided.isdisjoint(pairs)
    assert len(avoided | pairs) == 25


class TestTargetsLeftOut:
    """A model must not find the answer among the edges it is given."""

    @pytest.mark.parametrize("exclude", [True, "reverse"])
    def test_no_edge_of_the_batch_is_a_target(self, real_device, exclude):
        data = make_hetero()
        plain = list(LinkNeighborLoader(data, [-1], WRITES, batch_size=16, device=real_device))

        batches = list(LinkNeighborLoader(data, [-1], WRITES, batch_size=16, exclude_target_edges=exclude,
                                          device=real_device))  # fmt: skip

        for batch, other in zip(batches, plain, strict=True):
            links = {tuple(pair) for pair in data[WRITES].edge_index[:, batch[WRITES].input_id].t().tolist()}
            named, before = name_edges(batch), name_edges(other)
            check_rows(data, batch)
            assert named[WRITES] == [pair for pair in before[WRITES] if pair not in links]
            reverse = ("paper", "rev_writes", "author")
            kept = [pair for pair in before[reverse] if exclude is True or pair[::-1] not in links]
            assert named[reverse] == kept
            assert named[CITES] == before[CITES]
            for kind in data.edge_types:
                assert sum(batch[kind].num_sampled_edges) == batch[kind].num_edges

    def test_other_relations_with_just_the_reverse_edges_leave_them_out_too(self, real_device):
        data = make_hetero()
        data["paper", "by", "author"].edge_index = data[WRITES].edge_index.flip(0)

        for batch in LinkNeighborLoader(data, [-1], WRITES, batch_size=16, exclude_target_edges="reverse",
                                        device=real_device):  # fmt: skip
            links = {tuple(pair) for pair in data[WRITES].edge_index[:, batch[WRITES].input_id].t().tolist()}
            named = name_edges(batch)
            for kind in (("paper", "rev_writes", "author"), ("paper", "by", "author")):
                assert named[kind]
                assert links.isdisjoint(pair[::-1] for pair in named[kind])

    @pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
    def test_a_graph_without_types_too(self, real_device, subgraph_type):
        data = make_data()

        for batch in LinkNeighborLoader(data, [-1, 2], batch_size=16, exclude_target_edges=True,
                                        subgraph_type=subgraph_type, device=real_device):  # fmt: skip
            links = {tuple(pair) for pair in data.edge_index[:, batch.input_id].t().tolist()}
            edges = [tuple(pair) for pair in batch.n_id[batch.edge_index].t().tolist()]
            assert edges
            assert links.isdisjoint(edges)
            if subgraph_type == "bidirectional":
                assert links.isdisjoint(pair[::-1] for pair in edges)

    @pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "weight"}, {"disjoint": True},
                                         {"subgraph_type": "bidirectional"}],
                             ids=["uniform", "replace", "weights", "trees", "both ways"])  # fmt: skip
    @pytest.mark.parametrize("super_batch", [1, 3])
    def test_ends_have_as_many_neighbors_as_there_are_others(self, real_device, options, super_batch):
        edges = torch.unique(make_links(600, 40, 40), dim=1)
        data = Data(edge_index=edges, num_nodes=40, weight=torch.rand(edges.shape[1]) + 0.1)
        loader = LinkNeighborLoader(data, [3, 3], batch_size=30, exclude_target_edges=True, super_batch=super_batch,
                                    device=real_device, **options)  # fmt: skip

        for number, batch in enumerate(loader):
            links = set(map(tuple, edges[:, 30 * number :][:, :30].t().tolist()))
            both = links | {link[::-1] for link in links} if "subgraph_type" in options else links
            left = [pair for pair in edges.t().tolist() if tuple(pair) not in both]
            num_left = torch.bincount(torch.tensor(left)[:, 1], minlength=40)
            wanted = 3 * (num_left > 0) if "replace" in options else num_left.clamp(max=3)
            found = batch.edge_index[1].bincount(minlength=batch.num_nodes).cpu()
            expected = wanted[batch.n_id.cpu()]
            # Those that are found last are not expanded.
            num_expanded = batch.num_nodes if "subgraph_type" in options else sum(batch.num_sampled_nodes[:2])
            if "subgraph_type" in options:
                assert bool((found >= expected)[: len(links)].all())
            else:
                assert torch.equal(found[:num_expanded], expected[:num_expanded])
            assert both.isdisjoint(map(tuple, batch.n_id[batch.edge_index].t().tolist()))

    def test_a_cache_of_the_topology_is_said_to_have_no_effect(self):
        with pytest.warns(LoaderWarning, match="topology_cache='1M' has no effect with exclude_target_edges"):
            NeighborSampler(make_data(), [2], exclude_target_edges=True, topology_cache="1M", device="cpu")

    def test_unknown_words_are_refused(self):
        with pytest.raises(ArgumentError, match="exclude_target_edges must be False, True or 'reverse', got 'all'"):
            LinkNeighborLoader(make_data(), [2], exclude_target_edges="all", device="cpu")


def test_edges_around_links_are_those_around_their_ends(real_device):
    data, links = make_data(), make_links()

    (batch,) = LinkNeighborLoader(data, [-1, -1], links, batch_size=23, device=real_device)

    (around,) = NeighborLoader(data, [-1, -1], links.unique(), batch_size=99, device=real_device)
    assert batch.n_id.tolist() == around.n_id.tolist()
    assert batch.e_id.tolist() == around.e_id.tolist()
    assert torch.equal(batch.edge_index, around.edge_index)


def test_equal_seeds_give_equal_batches_whatever_is_made_ahead(real_device):
    options = {"neg_sampling": "binary", "batch_size": 50, "shuffle": True, "seed": 3}

    batches = list(LinkNeighborLoader(make_data(), [3, 2], **options, prefetch=2, device=real_device))

    for batch, other in zip(batches, LinkNeighborLoader(make_data(), [3, 2], **options, prefetch=0, device="cpu"),
                            strict=True):  # fmt: skip
        assert_equal_batches(batch, other)


def test_a_sampler_serves_our_loader_and_the_one_of_pyg(real_device):
    data = make_data()
    sampler = NeighborSampler(data, [-1], device=real_device, seed=1)

    ours = list(LinkLoader(data, sampler, neg_sampling="binary", batch_size=100))

    for batch, other in zip(ours, PygLinkLoader(data, sampler, neg_sampling="binary", batch_size=100), strict=True):
        assert set(batch.keys()) == set(other.keys())
        assert torch.equal(batch.edge_label.cpu(), other.edge_label.cpu())


def test_an_empty_list_of_links_is_an_empty_epoch(real_device):
    links, labels = torch.empty(2, 0, dtype=torch.int64), torch.empty(0)

    loader = LinkNeighborLoader(make_data(), [2], links, labels, neg_sampling_ratio=1.0, shuffle=True,
                                device=real_device)  # fmt: skip

    assert list(loader) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"edge_label_index": torch.zeros(3, 4).long()}, ArgumentError, r"must have shape \[2, L\], got \[3, 4\]"),
        ({"edge_label_index": torch.zeros(2, 4)}, ArgumentTypeError, "edge_label_index must have dtype int64 or int32"),
        ({"edge_label_index": torch.tensor([[0], [70]])}, ArgumentError, r"must lie in \[0, 70\), got 70"),
        ({"edge_label": torch.zeros(599)}, ArgumentError, r"a label for each of the 600 links, got shape \(599,\)"),
        ({"edge_label": torch.zeros(0)}, ArgumentError, "edge_label must have a label for each link, got none"),
        ({"edge_label": [1, 2]}, ArgumentTypeError, "edge_label must be a tensor, got list"),
        ({"edge_label_time": torch.zeros(600).long()}, ArgumentError, "'time_attr' is not set"),
        ({"time_attr": "time"}, ArgumentError, "'edge_label_time' is not set"),
        ({"edge_label_time": torch.zeros(9).long(), "time_attr": "time"}, ArgumentError, r"shape \(600,\), one for"),
        ({"edge_label_time": torch.zeros(600), "time_attr": "time"}, ArgumentTypeError, "must be a tensor of integers"),
        ({"neg_sampling": "triplet", "edge_label": torch.ones(600)}, ArgumentError, "edge_label must be None"),
        ({"neg_sampling": {"mode": "binary", "src_weight": torch.ones(9)}}, ArgumentError, r"weights of shape \(70,\)"),
        ({"neg_sampling": {"mode": "binary", "dst_weight": [1.0] * 70}}, ArgumentTypeError, "in a tensor, got list"),
        ({"neg_sampling": {"mode": "triplet", "amount": 1.5}}, ArgumentError, "'amount' needs to be an integer"),
        ({"neg_sampling_ratio": -1.0}, ArgumentError, "neg_sampling_ratio must be at least 0, got -1.0"),
        ({"input_id": torch.arange(9)}, ArgumentError, r"an id for each of the 600 seeds, got \(9,\)"),
        ({"neg_sampling": {"mode": "binary", "dst_weight": -torch.ones(70)}}, ArgumentError, "at least 0, got -1.0"),
        ({"neg_sampling": {"mode": "binary", "amount": 0}}, ArgumentError, "^neg_sampling .*'amount' needs to be pos"),
        ({"neg_sampling": "worst"}, ArgumentError, "^neg_sampling must be .* got 'worst'"),
        ({"neg_sampling": {"mode": "binary", "number": 3}}, ArgumentTypeError, "^neg_sampling must be .*'number'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    data = make_data(time=torch.zeros(70, dtype=torch.int64))

    with pytest.raises(error, match=words):
        LinkNeighborLoader(data, [2], **options, device="cpu")


@pytest.mark.parametrize(
    ("links", "error", "words"),
    [(None, ArgumentTypeError, "edge_label_index must be a relation or .* got None"),
     (torch.zeros(2, 3), ArgumentTypeError, "edge_label_index must be a relation"),
     (("author", "eats", "paper"), ArgumentError, "edge_label_index must name a known relation"),
     (("author", "writes", "poem"), ArgumentError, "must name known node types, got 'poem'"),
     ((WRITES, torch.tensor([[1], [0]]), 5), ArgumentError, r"a relation or \(relation, links\), got a tuple of 3"),
     ((WRITES, torch.tensor([[25], [0]])), ArgumentError, r"must lie in \[0, 25\), got 25")],
)  # fmt: skip
def test_bad_links_between_types_are_named(links, error, words):
    with pytest.raises(error, match=words):
        LinkNeighborLoader(make_hetero(), [2], links, device="cpu")
