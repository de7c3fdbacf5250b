"""Links of a graph in any form that PyG has edges in, and which relation is the reverse of another."""

import re

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import LinkLoader, LinkNeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.links import _reverse
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


@pytest.mark.parametrize(
    ("edge_type", "others", "expected"),
    [
        (WRITES, [("paper", "rev_writes", "author"), ("paper", "names", "author")], ("paper", "rev_writes", "author")),
        (("paper", "rev_writes", "author"), [WRITES, ("author", "reads", "paper")], WRITES),
        (WRITES, [("paper", "written_by", "author")], ("paper", "written_by", "author")),
        (WRITES, [CITES], ("paper", "writes", "author")),
        (WRITES, [("paper", "names", "author"), ("paper", "lists", "author")], ("paper", "writes", "author")),
        (CITES, [WRITES], CITES),
        (CITES, [("paper", "rev_cites", "paper")], ("paper", "rev_cites", "paper")),
    ],
)  # fmt: skip
def test_the_reverse_of_a_relation_is_found(edge_type, others, expected):
    assert _reverse(edge_type, [edge_type, *others]) == expected


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

    with pytest.raises(ArgumentError, match="strict_negatives and exclude_target_edges belong to the sampler"):
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
