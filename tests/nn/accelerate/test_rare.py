"""Rare uses of models with accelerated convolutions: still PyG's results, or its errors."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GCNConv, GINEConv, GraphConv, HeteroConv, RGCNConv, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn.replay.padded_batch import read_sizes
from tests.batches import make_data
from tests.nn.convolutions import CONVOLUTIONS, EDGES, NODES, OUT, WIDTH, Batch, assert_near, mlp

TARGETS = sum(NODES[:2])


def compare(conv, *args, **kwargs):
    """Compare results of PyG's and the accelerated code, with gradients of the parameters."""
    found = []
    for used in (conv, copy.deepcopy(conv)):
        if found:
            accelerate(used)
        out = used(*args, **kwargs)
        parts = [out] if isinstance(out, torch.Tensor) else [out[0], out[1][1]]
        grads = torch.autograd.grad(parts[0].double().sum(), list(used.parameters()), allow_unused=True)
        found.append([*parts, *(grad for grad in grads if grad is not None)])
    return found


@pytest.mark.parametrize("edges", [False, True], ids=["alone", "with rows of edges"])
def test_attention_is_returned_where_it_is_asked_for(edges, calls):
    batch, conv = Batch(), GATConv(WIDTH, OUT, heads=3, edge_dim=3 if edges else None)
    x, rows = torch.randn(batch.num_nodes, WIDTH), batch.edge_attr if edges else None

    own, got = compare(conv, x, batch.edge_index, rows, return_attention_weights=True)

    assert_near(got, own)


def test_rows_of_edges_without_loops_are_attended_to(calls):
    batch, conv = Batch(), GATConv(WIDTH, OUT, heads=3, edge_dim=3, add_self_loops=False)

    own, got = compare(conv, torch.randn(batch.num_nodes, WIDTH), batch.edge_index, batch.edge_attr)

    assert_near(got, own)
    assert calls == ["sum"]


def test_weights_without_loops_are_normalised(calls):
    batch, conv = Batch(), GCNConv(WIDTH, OUT, add_self_loops=False)

    own, got = compare(conv, torch.randn(batch.num_nodes, WIDTH), batch.edge_index, batch.edge_weight)

    assert_near(got, own)
    assert len(calls) == 2


@pytest.mark.parametrize("loops", [False, True], ids=["no loops", "loops"])
@pytest.mark.parametrize("out", [4, 2 * WIDTH], ids=["to narrow rows", "to wide rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_of_another_dtype_make_results_of_the_wider_one(out, loops, dtype, calls):
    batch, conv = Batch(), GCNConv(WIDTH, out, add_self_loops=loops)

    own, got = compare(conv, torch.randn(batch.num_nodes, WIDTH), batch.edge_index, batch.edge_weight.to(dtype))

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert [part.dtype for part in got] == [part.dtype for part in own]
    assert_near(got, own, tolerance, tolerance)


def test_weights_that_are_integers_are_refused_in_the_words_of_pyg():
    batch, conv = Batch(), GCNConv(WIDTH, OUT)
    given = torch.randn(batch.num_nodes, WIDTH), batch.edge_index, torch.ones(sum(EDGES), dtype=torch.int64)
    accelerate(conv)

    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        conv(*given)


@pytest.mark.parametrize("conv", [GCNConv(WIDTH, 2 * WIDTH), GCNConv(WIDTH, 2 * WIDTH, bias=False),
                                  RGCNConv(WIDTH, OUT, 3, bias=False), RGCNConv(WIDTH, OUT, 3)],
                         ids=["GCN", "GCN without bias", "RGCN without bias", "RGCN"])  # fmt: skip
def test_autocast_keeps_the_dtype_of_pyg(conv):
    batch = Batch()
    given = (torch.arange(sum(EDGES)) % 3,) if isinstance(conv, RGCNConv) else ()

    with torch.autocast("cpu", torch.bfloat16):
        own, got = compare(conv, torch.randn(batch.num_nodes, WIDTH), batch.edge_index, *given)

    assert [part.dtype for part in got] == [part.dtype for part in own]
    assert_near([part / own[0].abs().max() for part in got[:1]], [part / own[0].abs().max() for part in own[:1]], 2e-2,
                2e-2)  # fmt: skip


@pytest.mark.parametrize(
    "conv",
    [SAGEConv((WIDTH, 5), OUT, root_weight=False), SAGEConv((WIDTH, 5), OUT, root_weight=True, bias=False),
     GraphConv((WIDTH, 5), OUT, bias=False), GATConv((WIDTH, 5), OUT, heads=2, add_self_loops=False)],
    ids=["SAGE without own rows", "SAGE", "Graph", "GAT"],
)  # fmt: skip
def test_targets_have_rows_of_their_own(conv, calls):
    batch = Batch()
    rows = torch.randn(batch.num_nodes, WIDTH), torch.randn(TARGETS, 5)

    own, got = compare(conv, rows, batch.edge_index)

    assert_near(got, own)
    assert len(calls) == 1


@pytest.mark.parametrize("conv", [SAGEConv(WIDTH, OUT), GraphConv(WIDTH, OUT), GCNConv(WIDTH, OUT)], ids=type)
def test_rows_of_several_graphs_at_once_stay_pygs(conv, calls):
    batch = Batch()

    own, got = compare(conv, torch.randn(2, batch.num_nodes, WIDTH), batch.edge_index)

    assert_near(got, own)
    assert calls == []


@pytest.mark.parametrize(
    ("conv", "options"),
    [(GraphConv(WIDTH, OUT), {"edge_weight": torch.ones(sum(EDGES), 2)}),
     (GraphConv(WIDTH, OUT), {"edge_weight": torch.ones(3)}),
     (GINEConv(mlp(), edge_dim=3), {"edge_attr": torch.ones(5, 3)}),
     (SAGEConv(WIDTH, OUT), {"size": (25, 99)})],
    ids=["two weights an edge", "weights of other edges", "rows of other edges", "another size"],
)  # fmt: skip
def test_what_pyg_refuses_is_refused_in_its_words(conv, options):
    batch = Batch()
    x = torch.randn(batch.num_nodes, WIDTH)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        conv(x, batch.edge_index, **options)

    accelerate(conv)

    with pytest.raises(expected.type) as got:
        conv(x, batch.edge_index, **options)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("conv", [SAGEConv(WIDTH, OUT), GraphConv(WIDTH, OUT), GCNConv(WIDTH, OUT)], ids=type)
@pytest.mark.parametrize(("given", "named"), [((), {"weight": None}), ((None, None, None), {})], ids=["name", "count"])
def test_arguments_that_no_layer_takes_are_refused_as_by_pyg(conv, given, named):
    batch = Batch()
    x = torch.randn(batch.num_nodes, WIDTH)
    accelerate(conv)

    with pytest.raises(TypeError, match=r"forward\(\) (got an unexpected keyword|takes from)"):
        conv(x, batch.edge_index, *given, **named)


def test_sizes_are_read_of_known_batches_only():
    plain = make_data()
    known = Batch()
    counted = plain.__class__(edge_index=known.edge_index, num_nodes=known.num_nodes, batch_size=4,
                              num_sampled_nodes=list(NODES), num_sampled_edges=list(EDGES))  # fmt: skip
    assert list(read_sizes(counted).nodes.values()) == [tuple(NODES)]
    assert list(read_sizes(counted).edges.values()) == [tuple(EDGES)]

    for name, value in (("num_sampled_nodes", [4, 9]), ("num_sampled_edges", [16]), ("batch_size", None)):
        other = copy.copy(counted)
        other[name] = value
        assert read_sizes(other) is None
    assert read_sizes(plain) is None
    assert read_sizes(HeteroData()) is None


@pytest.mark.filterwarnings("ignore:Converting sparse tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("name", [*CONVOLUTIONS, "relations"])
def test_sparse_matrices_take_the_code_of_pyg(name, layout, calls):
    matrix = torch.rand(12, 12).masked_fill(torch.rand(12, 12) < 0.7, 0).fill_diagonal_(1).to_sparse(layout=layout)
    if name == "relations":
        kinds = [("a", "to", "a"), ("a", "by", "a")]
        conv = HeteroConv({kind: SAGEConv(WIDTH, OUT) for kind in kinds})
        given = {"a": torch.rand(12, WIDTH)}, dict.fromkeys(kinds, matrix)
    else:
        conv = CONVOLUTIONS[name]()
        width = conv.in_channels if hasattr(conv, "in_channels") else WIDTH
        given = torch.rand(12, width), matrix

    found = []
    for used in (conv, copy.deepcopy(conv)):
        if found:
            accelerate(used)
        try:
            out = used(*given)
            found.append(out["a"] if name == "relations" else out)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            found.append(str(error))

    own, got = found
    assert own == got if isinstance(own, str) else torch.equal(own, got)
    # PyG itself knows not all of them.
    assert isinstance(own, torch.Tensor) or name == "gine" or layout != torch.sparse_csr
    assert calls == []
