"""Links of a graph in any form that PyG has edges in, and which relation is the reverse of another."""

import re

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import LinkLoader, LinkNeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.hetero_data import make_hetero, name_edges

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
LAYOUTS = ["torch", pytest.param("torch_sparse", marks=pytest.mark.sparse)]


def make_adjacency(edge_index, size, layout):
    """The transposed adjacency, and its links in its order."""
    source, target = edge_index[:, (edge_index[1] * size[0] + edge_index[0]).argsort(stable=True)]
    if layout == "torch":
        indptr = torch.cat([torch.zeros(1).long(), torch.bincount(target, minlength=size[1]).cumsum(0)])
        adj_t = torch.sparse_csr_tensor(indptr, source, torch.ones(source.numel()), size[::-1])
    else:
        from torch_sparse import SparseTensor

        adj_t = SparseTensor(row=target, col=source, sparse_sizes=size[::-1])
    return adj_t, torch.stack([source, target])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_are_by_default_the_edges_of_an_adjacency(real_device, layout):
    data = make_data()
    adj_t, expected = make_adjacency(data.edge_index, (70, 70), layout)

    loader = LinkNeighborLoader(Data(x=data.x, adj_t=adj_t), [2], batch_size=300, device=real_device)

    found = [batch.n_id[batch.edge_label_index].cpu() for batch in loader]
    assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_are_by_default_the_edges_of_a_relation(real_device, layout):
    data = make_hetero()
    del data["nobody"], data[WRITES].edge_attr
    data[WRITES].adj_t, expected = make_adjacency(data[WRITES].edge_index, (25, 40), layout)
    del data[WRITES].edge_index

    (batch,) = LinkNeighborLoader(data, [2], WRITES, batch_size=1000, device=real_device)

    source, target = batch[WRITES].edge_label_index
    found = torch.stack([batch["author"].n_id[source], batch["paper"].n_id[target]])
    assert torch.equal(found.cpu(), expected)


REV_WRITES, NAMES, LISTS = (("paper", name, "author") for name in ("rev_writes", "names", "lists"))
TURNED, OTHER = torch.tensor([[3, 1, 1], [0, 2, 2]]), torch.tensor([[3, 1], [0, 0]])


def make_relations(edge_type, others):
    """A graph with a relation, and with others of these edges."""
    data = HeteroData({"author": {"x": torch.zeros(6, 1)}, "paper": {"x": torch.zeros(6, 1)}})
    data[edge_type].edge_index = TURNED.flip(0)
    for kind, edges in others.items():
        data[kind].edge_index = edges
    return data


def list_left_out(data, edge_type, **options):
    """The relations that lose the reverse edges of links."""
    sampler = NeighborSampler(data, {kind: [1] for kind in data.edge_types}, exclude_target_edges="reverse",
                              device="cpu", **options)  # fmt: skip
    found = sampler.find_ways(edge_type)
    assert found[0] == (edge_type, False)
    return [kind for kind, is_turned in found[1:] if is_turned]


@pytest.mark.parametrize(
    ("edge_type", "others", "expected"),
    [
        (WRITES, {REV_WRITES: OTHER, NAMES: TURNED}, [REV_WRITES, NAMES]),
        (WRITES, {REV_WRITES: OTHER, NAMES: OTHER}, [REV_WRITES]),
        (REV_WRITES, {WRITES: OTHER, NAMES: TURNED.flip(0)}, [WRITES]),
        (WRITES, {NAMES: TURNED[:, :2], LISTS: OTHER}, [NAMES]),
        (WRITES, {NAMES: TURNED, LISTS: TURNED}, [NAMES, LISTS]),
        (WRITES, {CITES: TURNED}, []),
        (CITES, {WRITES: TURNED}, [CITES]),
        (CITES, {("paper", "cited_by", "paper"): TURNED, ("paper", "likes", "paper"): OTHER},
         [CITES, ("paper", "cited_by", "paper")]),
        (CITES, {("paper", "rev_cites", "paper"): OTHER}, [("paper", "rev_cites", "paper")]),
    ],
)  # fmt: skip
def test_the_reverse_of_a_relation_is_found(edge_type, others, expected):
    assert list_left_out(make_relations(edge_type, others), edge_type) == expected


@pytest.mark.parametrize("others", [{NAMES: OTHER}, {NAMES: OTHER, LISTS: OTHER}], ids=["one", "two"])
def test_a_reverse_that_is_not_known_is_refused_until_it_is_named(others):
    data = make_relations(WRITES, others)

    with pytest.raises(ArgumentError, match=r"exclude_target_edges='reverse' must know .*; pass rev_edge_type, one of"):
        LinkNeighborLoader(data, [1], WRITES, exclude_target_edges="reverse", device="cpu")
    assert list_left_out(data, WRITES, rev_edge_type=NAMES) == [NAMES]
    # In both directions an edge of any of them stands beside the link.
    assert list_left_out(data, WRITES, rev_edge_type=list(NAMES), subgraph_type="bidirectional") == list(others)


@pytest.mark.parametrize(("options", "message"), [
    ({"rev_edge_type": NAMES}, "rev_edge_type must be None unless exclude_target_edges='reverse'"),
    ({"rev_edge_type": NAMES, "exclude_target_edges": True}, "rev_edge_type must be None unless"),
    ({"rev_edge_type": LISTS, "exclude_target_edges": "reverse"}, "rev_edge_type must be a relation of the graph, got"),
    ({"rev_edge_type": "names", "exclude_target_edges": "reverse"}, r"must be a relation \(source, name, target\)"),
    ({"rev_edge_type": WRITES, "exclude_target_edges": "reverse"}, "must lead back from 'paper' to 'author'"),
])  # fmt: skip
def test_a_reverse_that_is_none_is_refused(options, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        LinkNeighborLoader(make_relations(WRITES, {NAMES: TURNED}), [1], WRITES, device="cpu", **options)


def test_a_graph_without_types_has_no_relation_of_reverse_edges():
    with pytest.raises(ArgumentError, match="rev_edge_type must be None for a graph without types"):
        LinkNeighborLoader(make_data(), [1], exclude_target_edges="reverse", rev_edge_type=NAMES, device="cpu")


@pytest.mark.parametrize("via", ["in stores", "of a sampler"])
def test_a_named_relation_loses_the_reverse_edges(real_device, via):
    data = make_relations(WRITES, {NAMES: torch.cat([TURNED, OTHER], 1), LISTS: TURNED})
    own = {"exclude_target_edges": "reverse", "rev_edge_type": NAMES, "device": real_device}
    if via == "in stores":
        loader = LinkNeighborLoader((data, data), [-1], (WRITES, TURNED.flip(0)), batch_size=3, **own)
    else:
        sampler = NeighborSampler(data, [-1], **own)
        loader = LinkLoader(data, sampler, WRITES, batch_size=3, device=real_device)

    for batch in (*loader, loader([0, 1, 2])):
        named = name_edges(batch)
        # What is no link turned round stays, and so do relations that were not named.
        assert named[WRITES] == []
        assert named[NAMES] == [(1, 0)]
        assert sorted(named[LISTS]) == [(1, 2), (1, 2), (3, 0)]


def test_links_that_are_no_tensor_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"edge_label_index must be links \[2, L\] or None, got 'some'"):
        LinkNeighborLoader(make_data(), [2], "some", device="cpu")


@pytest.mark.parametrize("is_typed", [False, True])
def test_links_must_be_given_where_there_are_no_edges(is_typed):
    data, links, name = Data(x=torch.zeros(3, 1)), None, "data"
    if is_typed:
        data, links, name = make_hetero(), CITES, f"data[{CITES}]"
        del data[CITES].edge_index

    with pytest.raises(ArgumentError, match=re.escape(f"edge_label_index must have the links, as {name} has no edges")):
        LinkNeighborLoader(data, [2], links, device="cpu")


def test_what_a_sampler_knows_is_not_told_to_its_loader():
    data = make_data()
    sampler = NeighborSampler(data, [2], device="cpu")

    with pytest.raises(ArgumentError, match="strict_negatives, exclude_target_edges and rev_edge_type belong to"):
        LinkNeighborLoader(data, [2], neighbor_sampler=sampler, strict_negatives=True, neg_sampling="binary")


def test_a_graph_with_types_needs_a_relation():
    data = make_hetero()
    sampler = NeighborSampler(data, [2], device="cpu")

    with pytest.raises((ArgumentError, ArgumentTypeError), match="edge_label_index must"):
        list(LinkLoader(data, sampler, data[CITES].edge_index))


def test_edges_of_links_may_leave_the_batch_both_ways(real_device):
    data = make_hetero()
    data["paper", "rev_writes", "author"].edge_index = data[WRITES].edge_index.flip(0)
    data["paper", "rev_writes", "author"].edge_attr = torch.arange(150)
    links = data[WRITES].edge_index[:, :9]

    (batch,) = LinkNeighborLoader(data, [-1], (WRITES, links), exclude_target_edges="reverse", batch_size=9,
                                  device=real_device)  # fmt: skip

    left = {tuple(link) for link in links.T.tolist()}
    named = name_edges(batch)
    assert not left & set(named[WRITES])
    assert not left & {(target, source) for source, target in named["paper", "rev_writes", "author"]}


@pytest.mark.parametrize("options", [{}, {"neg_sampling": "triplet"}, {"disjoint": True}, {"subgraph_type": "induced"}],
                         ids=["plain", "negatives", "trees", "induced"])  # fmt: skip
def test_an_attribute_of_the_graph_that_is_named_like_the_number_of_seeds_stays(real_device, options):
    data = make_data()
    data.batch_size = 77

    for batch in LinkNeighborLoader(data, [2], batch_size=300, device=real_device, **options):
        assert batch.batch_size == 77


def test_a_relation_that_is_misspelt_is_said(recwarn):
    data, links = make_hetero(), torch.tensor([[0, 1], [2, 3]])

    LinkNeighborLoader(data, [2], (("author", "write", "paper"), links), device="cpu")
    assert str(recwarn.pop(UserWarning).message).endswith(f"did you mean {WRITES}?")

    # Links of a relation of their own, as PyG has them, too.
    LinkNeighborLoader(data, [2], (("author", "will_cite", "paper"), links), device="cpu")
    LinkNeighborLoader(data, [2], (WRITES, links), device="cpu")
    assert len(recwarn) == 0


@pytest.mark.parametrize(("links", "said"), [
    ([[25], [0]], r"edge_label_index\[0\], of 'author', must lie in \[0, 25\), got 25"),
    ([[0], [40]], r"edge_label_index\[1\], of 'paper', must lie in \[0, 40\), got 40"),
])  # fmt: skip
def test_an_end_that_is_out_of_range_is_named(links, said):
    with pytest.raises(IdError, match=said):
        LinkNeighborLoader(make_hetero(), [2], (WRITES, torch.tensor(links)), device="cpu")
