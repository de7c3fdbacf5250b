"""Attention over many relations: PyG's results and gradients, with products only of rows that a relation reads."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, HeteroConv

from benchmarks.nn.rgat import RGAT
from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets.igbh import synthetic_igbh
from pyg_direct.kernels.aggregate.typed_attention import warps_of_row
from pyg_direct.nn.hetero import attention, joined_edges
from pyg_direct.nn.hetero.unread_rows import RowsOfPass
from pyg_direct.ops.aggregate import compute_softmax, compute_typed_attention, operators
from pyg_direct.ops.local_ids.build_csr import compress_ids
from tests import cuda_on_cpu

WIDTH, HIDDEN, CLASSES = 24, 32, 5


@pytest.fixture(scope="module")
def graph():
    return make_graph()


def make_graph(seed=0):
    return synthetic_igbh(3e-6, seed=seed, num_features=WIDTH, num_classes=CLASSES, dtype=torch.float32)


def draw_batch(graph, device, fanouts=(4, 3, 2), size=30):
    device = "cuda" if str(device).startswith("cuda") else "cpu"
    loader = NeighborLoader(graph, list(fanouts), ("paper", torch.arange(size)), batch_size=size, device=device)
    return next(iter(loader))


def differentiate(model, batch, dtype=None):
    """Return the result and the gradients of all parameters, in float64."""
    with torch.autocast(batch["paper"].x.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(batch)
    found = torch.autograd.grad(out.double().pow(2).sum(), list(model.parameters()), allow_unused=True)
    return out, found


def convert(batch, dtype):
    batch = copy.copy(batch)
    for store in batch.node_stores:
        store.x = store.x.to(dtype)
    return batch


@pytest.fixture
def read(monkeypatch):
    """Record (rows of all relations, rows that are read) of each join."""
    made, plain = [], joined_edges._find_read

    def note(edges, *args):
        found = plain(edges, *args)
        made.append((edges.num_sources, sum(found.sizes)))
        return found

    monkeypatch.setattr(joined_edges, "_find_read", note)
    return made


def test_trimmed_layers_multiply_what_relations_read_and_equal_pyg(real_device, graph, read):
    batch = convert(draw_batch(graph, real_device), torch.float64)
    model = RGAT(batch, CLASSES, HIDDEN).to(real_device, torch.float64)
    expected, grads = differentiate(model, batch)

    accelerate(model)
    got, found = differentiate(model, batch)

    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(found, grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    assert read
    assert all(2 * few <= all_rows for all_rows, few in read)


def test_gradients_in_fp32_are_those_of_pyg(real_device, graph):
    batch = draw_batch(graph, real_device)
    model = RGAT(batch, CLASSES, HIDDEN).to(real_device)
    expected, grads = differentiate(model, batch)
    _, exact = differentiate(copy.deepcopy(model).double(), convert(batch, torch.float64))

    accelerate(model)
    got, found = differentiate(model, batch)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for one, other, precise in zip(found, grads, exact, strict=True):
        if one is None:
            continue
        if float(precise.abs().max()) < 1e-12:
            # No target of the relation has two neighbors, so that attention has no gradient but rounding.
            assert float(one.abs().max()) < 1e-5
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("make", [GATConv, GATv2Conv])
def test_frozen_relations_over_given_rows_leave_others_gradients_of_gradients(real_device, graph, read, make):
    batch = convert(draw_batch(graph, real_device), torch.float64)
    layer = HeteroConv({kind: make((WIDTH, WIDTH), 4, 2, add_self_loops=False) for kind in batch.edge_types})
    layer.to(real_device, torch.float64)
    # Neither the rows nor the matrices of one relation get gradients.
    layer.convs["paper", "cites", "paper"].requires_grad_(False)
    leaves = [part for part in layer.parameters() if part.requires_grad]

    def run():
        outs = layer(batch.x_dict, batch.edge_index_dict)
        total = sum(out.square().sum() for out in outs.values())
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), leaves)

    expected = run()
    accelerate(layer)
    most = max(float(part.abs().max()) for part in expected)
    for got, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-8, atol=1e-12 * most)
    assert read


@pytest.mark.parametrize("narrow", ["lin", "att"])
def test_matrices_and_vectors_of_two_dtypes_are_those_of_pyg_under_autocast(real_device, graph, narrow):
    batch = draw_batch(graph, real_device)
    layer = HeteroConv({kind: GATConv((WIDTH, WIDTH), 4, 2, add_self_loops=False) for kind in batch.edge_types})
    layer.to(real_device)
    for name, part in layer.named_parameters():
        if narrow in name:
            part.data = part.data.bfloat16()

    def run():
        with torch.autocast(real_device.type, torch.bfloat16):
            return layer(batch.x_dict, batch.edge_index_dict)

    expected = run()
    accelerate(layer)
    for kind, got in run().items():
        torch.testing.assert_close(got, expected[kind], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_float64_as_pyg(real_device, stored):
    errors = []
    # Of one graph the errors of a layer and of PyG's differ by a tenth or two either way.
    for seed in range(8):
        batch = convert(draw_batch(make_graph(seed), real_device), stored)
        torch.manual_seed(seed)
        model = RGAT(batch, CLASSES, HIDDEN).to(real_device)
        exact, exact_grads = differentiate(copy.deepcopy(model).double(), convert(batch, torch.float64))
        for fast in (False, True):
            if fast:
                accelerate(model)
            out, grads = differentiate(model, batch, torch.bfloat16)
            pairs = [(one, other) for one, other in zip(grads, exact_grads, strict=True) if one is not None]
            missed = sum((one.double() - other).square().sum() for one, other in pairs)
            errors += [(out.double() - exact).norm() / exact.norm(),
                       (missed / sum(other.square().sum() for _, other in pairs)).sqrt()]  # fmt: skip

    plain, fast = torch.stack(errors).view(8, 2, 2).mean(0)
    assert (fast <= 1.1 * plain).all(), (fast, plain)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("count", [1, 2])
def test_stored_rows_of_8_bits_are_left_to_the_first_product(real_device, graph, stored, count):
    batch = convert(draw_batch(graph, real_device), stored)
    # These numbers are exact in bfloat16.
    wide = convert(batch, torch.bfloat16)
    kinds = [("paper", "cites", "paper"), ("paper", "written_by", "author")][:count]
    model = HeteroConv({kind: GATConv((WIDTH, WIDTH), 4, 3, add_self_loops=False) for kind in kinds}).to(real_device)
    edges = {kind: batch.edge_index_dict[kind] for kind in kinds}
    handle = accelerate(model, replay=False)
    made = []

    for given in (wide, batch):
        with torch.autocast(real_device.type, torch.bfloat16):
            out = model(given.x_dict, edges)["paper"]
        total = out.float().square().sum()
        made.append((out, *torch.autograd.grad(total, list(model.parameters()), allow_unused=True)))

    for one, other in zip(*made, strict=True):
        assert (one is None) == (other is None)
        # A GPU adds up scores in another order each time.
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))
    told = [line for line in str(handle.report()).splitlines() if "GATConv" in line]
    assert len(told) == count
    assert all("2 accelerated" in line and "PyG" not in line for line in told), told


@pytest.mark.parametrize("case", ["repeated edges and a hub", "no edges", "a single edge"])
def test_edges_of_any_shape_equal_pyg(real_device, graph, case):
    batch = draw_batch(graph, real_device, (-1, -1))
    count = {"no edges": 0, "a single edge": 1}.get(case)
    edges = {kind: pair[:, :count] for kind, pair in batch.edge_index_dict.items()}
    if case == "repeated edges and a hub":
        other = graph.clone()
        for kind in other.edge_types:
            pair = other[kind].edge_index
            other[kind].edge_index = torch.cat([pair, pair, torch.stack([pair[0], pair[1] * 0])], dim=1)
        batch = draw_batch(other, real_device, (-1, -1))
        edges = batch.edge_index_dict
    x = {kind: rows.double().requires_grad_() for kind, rows in batch.x_dict.items()}
    model = HeteroConv({kind: GATConv((WIDTH, WIDTH), 4, 3, add_self_loops=False) for kind in edges})
    model = model.to(real_device, torch.float64)
    given = [*x.values(), *model.parameters()]

    def run():
        out = model(x, edges)
        return [*out.values(), *torch.autograd.grad(sum(rows.pow(2).sum() for rows in out.values()), given)]

    expected = run()
    accelerate(model)

    for one, other in zip(run(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_edges_are_searched_once_for_the_layers_that_share_them(graph, read):
    batch = draw_batch(graph, "cpu")
    x, edges = batch.x_dict, batch.edge_index_dict
    layers = [HeteroConv({kind: GATConv((WIDTH, WIDTH), 4, 2, add_self_loops=False) for kind in edges}) for _ in "ab"]

    for layer in layers:
        accelerate(layer)
        layer(x, edges)

    assert len(read) == 1


def make_edges(device, num_sources, num_targets, degree):
    """Joined edges of relations, up to `degree` a target; few sources have many edges."""
    draw = torch.Generator().manual_seed(0)
    rows, targets, begin, first = [], [], 0, 0
    for sources, count in zip(num_sources, num_targets, strict=True):
        target = torch.arange(count).repeat_interleave(torch.randint(degree + 1, (count,), generator=draw))
        target = target[: len(target) if sources else 0]
        rows.append(begin + torch.randint(max(sources, 1), target.shape, generator=draw))
        targets.append(first + target)
        begin, first = begin + sources, first + count
    row, target = torch.cat(rows).to(device), torch.cat(targets).to(device)
    batch = SimpleNamespace(remember=lambda key, make: make())
    return joined_edges.JoinedEdges(compress_ids(target, first), row, target, list(num_targets), [len(r) for r in rows],
                                    begin, degree, batch, ())  # fmt: skip


class Case:
    """A layer of four relations into two types, one without sources; few sources of one have many edges."""

    def __init__(self, kind, dtype, heads, channels, degree, sources, targets, device):
        counts = targets[0] + 5, targets[1] + 2
        self.read = joined_edges.ReadSources(None, sources, make_edges(device, sources, targets, degree))
        self.groups = joined_edges.Groups([[0, 2], [1, 3]], counts, targets, torch.float32)
        self.heads, draw = heads, torch.Generator().manual_seed(1)

        def make(*shape):
            return torch.randn(shape, generator=draw).to(device)

        width = heads * channels
        own = make(sum(targets), heads) if kind == "gat" else make(sum(targets), width).to(dtype)
        vectors = [make(1, heads, channels) * channels**-0.5 for _ in range(4)]
        self.given = [make(sum(sources), width).to(dtype), own, *vectors, make(width), make(width)]
        self.weights = [make(count, width) for count in counts]

    def run(self, function, again=False):
        """Return results, gradients and gradients of these."""
        leaves = [part.clone().requires_grad_() for part in self.given]
        outs = function(attention._Layer(self.read, self.groups, [True] * 4, 0.2), *leaves)
        loss = sum((out * weight).sum() for out, weight in zip(outs, self.weights, strict=True))
        found = torch.autograd.grad(loss, leaves, create_graph=again)
        more = torch.autograd.grad(found[1].float().square().sum(), leaves[:3]) if again else ()
        return [*outs, *found, *more]


PAIRS = {"gat": (attention._compose, attention._Attend.apply),
         "gatv2": (attention._compose_pairs, attention._AttendPairs.apply)}  # fmt: skip


def assert_close(got, expected, dtype):
    exact = dtype == torch.float32
    for one, other in zip(got, expected, strict=True):
        scale = float(other.detach().float().abs().max())
        torch.testing.assert_close(one, other, rtol=1e-4 if exact else 2e-2, atol=scale * (1e-5 if exact else 1e-2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "channels"), [(1, 8), (2, 16), (4, 128), (3, 64)])
@pytest.mark.parametrize("degree", [3, 15])
@pytest.mark.parametrize("kind", PAIRS)
def test_one_launch_equals_operators_that_it_replaces(kind, dtype, heads, channels, degree):
    case = Case(kind, dtype, heads, channels, degree, [500, 4, 0, 60], [400, 300, 20, 70], "cuda")

    assert attention.can_attend(case.given[0], heads, case.read)
    # Torch adds up gradients of sources with many edges in 16 bits: the exact ones are those of wide rows.
    exact = Case(kind, torch.float32, heads, channels, degree, [500, 4, 0, 60], [400, 300, 20, 70], "cuda")
    exact.given = [part.float() for part in case.given]
    composed, fused = PAIRS[kind]

    assert_close([part.float() for part in case.run(fused)], exact.run(composed), dtype)
    twice = case.run(fused, again=True)
    if dtype == torch.float32:
        assert_close(twice, exact.run(composed, again=True), dtype)
    assert all(part.isfinite().all() for part in twice)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_on_cpu.load(["attend", "typed_attention", "pair_attention"], tmp_path_factory.mktemp("cuda"))


# Names of the number of items of a kernel.
BY_WARP = ("attend_groups_gpu", "pull_scores_gpu", "pull_attention_gpu")
COUNTS = ("num_sources", "num_runs", "num_targets", "num_slices", "num_rows")


@pytest.fixture
def launches(library, monkeypatch):
    """Run kernels of attention on a CPU, with their C++, and record their names."""
    names = []

    def run(kernel, grid, *args):
        names.append(kernel.name)
        at = {name: i for i, name in enumerate(kernel.fn.__code__.co_varnames[: len(args)])}
        if "lanes" not in at and "pieces" not in at:
            cuda_on_cpu.run(library, kernel, args)
            return
        count = next(args[at[name]] for name in COUNTS if name in at)
        if "lanes" not in at:
            cuda_on_cpu.run(library, kernel, args, count * args[at["pieces"]])
            return
        count += args[at["slices"]].numel() // 2 if "slices" in at else 0
        count = -(-count // args[at["run"]]) if "run" in at else count
        if kernel.name in BY_WARP:
            warps = warps_of_row(args[at["heads"]], args[at["lanes"]])
            cuda_on_cpu.run(library, kernel, args, count * warps, 32)
            return
        cuda_on_cpu.run(library, kernel, args, count * args[at["heads"]], args[at["lanes"]])

    for module in (compute_typed_attention, operators, compute_softmax):
        monkeypatch.setattr(module, "run_gpu", run)
    for module in (compute_typed_attention, compute_softmax):
        monkeypatch.setattr(module, "runs_on_gpu", lambda rows: True)
    monkeypatch.setattr(operators, "full_grid", lambda *_: 1)
    monkeypatch.setattr(operators, "grid_for", lambda *_: 1)
    for module in (compute_typed_attention, compute_softmax):
        monkeypatch.setattr(module, "length_of_run", lambda *_: 3)
    return names


# Rows of the last one take all threads of a warp.
SHAPES = [(torch.float32, 2, 16), (torch.float16, 1, 32), (torch.bfloat16, 3, 8), (torch.bfloat16, 8, 32)]
# A thread has two pieces of a row.
LONG_ROWS = [(torch.float32, 3, 64), (torch.bfloat16, 2, 256)]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("dtype", "heads", "channels"), [*SHAPES, *LONG_ROWS])
@pytest.mark.parametrize("kind", PAIRS)
def test_code_of_gpus_equals_the_operators_on_a_cpu(kind, dtype, heads, channels, launches, monkeypatch):
    case = Case(kind, dtype, heads, channels, 15, [40, 3, 0, 15], [30, 150, 5, 10], "cpu")
    compose, fused = PAIRS[kind]

    got = case.run(fused)
    names, _ = list(launches), monkeypatch.undo()
    expected = case.run(compose)

    assert_close(got, expected, dtype)
    both = {"find_slices_gpu", "join_rows_gpu"}
    others = ({"attend_groups_gpu", "pull_scores_gpu", "pull_attention_gpu"} if kind == "gat"
              else {"attend_pairs_gpu", "total_gradients_gpu", "add_groups_gpu", "pull_keys_gpu",
                    "pull_queries_gpu"})  # fmt: skip
    assert both | others < set(names)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_sums_that_a_relu_follows_are_written_as_the_next_layer_reads_them(graph, launches, monkeypatch):
    batch = draw_batch(graph, "cpu", (2, 1, 1), 3)
    torch.manual_seed(0)
    model = RGAT(graph, CLASSES, HIDDEN)
    accelerate(model, replay=False)
    rows, dtypes = RowsOfPass(), []
    plain = attention.attend_groups
    monkeypatch.setattr(attention, "attend_groups", lambda *given: note_sums(dtypes, plain(*given)))

    def run():
        with rows.leave_out(float("nan")):
            return differentiate(model, batch, torch.bfloat16)

    with torch.autocast("cpu", torch.bfloat16), rows.follow():
        assert rows.find_unread([model(batch)])
    expected, grads = run()
    # The last layer is followed by a matrix of its own.
    assert rows.find_relus([]) is True
    assert rows._relus == {0, 1}
    out, found = run()

    assert dtypes == [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.float32]
    assert torch.equal(out, expected)
    for grad, exact in zip(found, grads, strict=True):
        assert (grad is None) == (exact is None)
        assert grad is None or (grad - exact).norm() <= 3e-2 * exact.norm() + 1e-6


def note_sums(dtypes, made):
    dtypes.append(made[0][0].dtype)
    return made


class ProductCase:
    """Keys and values of some sources, and queries of targets; few sources have many edges."""

    def __init__(self, dtype, heads, channels, device):
        sources, targets, degree, draw = 40, 30, 15, torch.Generator().manual_seed(1)
        edges = make_edges(device, [sources], [targets], degree)
        self.edges = attention.ProductEdges(*edges[:3], sources, targets, degree, edges.batch, ())
        shapes = (sources, 2 * heads * channels), (targets, heads * channels), (targets, heads * channels)
        self.both, self.queries, self.weight = (torch.randn(shape, generator=draw).to(device, dtype)
                                                for shape in shapes)  # fmt: skip
        self.heads = heads

    def run(self, function, again=False):
        """Return results, gradients and gradients of these."""
        leaves = [part.clone().requires_grad_() for part in (self.both, self.queries)]
        out = function(self.edges, self.heads, *leaves)
        found = torch.autograd.grad((out * self.weight).float().sum(), leaves, create_graph=again)
        more = torch.autograd.grad(found[1].float().square().sum(), leaves) if again else ()
        return [out, *found, *more]


def compose_products(*given):
    return attention._compose_products(*given)[0]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("dtype", "heads", "channels"), SHAPES)
def test_code_of_gpus_for_products_equals_the_operators_on_a_cpu(dtype, heads, channels, launches, monkeypatch):
    case = ProductCase(dtype, heads, channels, "cpu")

    assert attention.can_attend_products(case.both, case.heads, case.edges)
    got = case.run(attention._AttendProducts.apply)
    names, _ = list(launches), monkeypatch.undo()

    assert_close(got, case.run(compose_products), dtype)
    assert {"attend_pairs_gpu", "total_gradients_gpu", "pull_keys_gpu", "pull_queries_gpu"} <= set(names)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "channels"), [(1, 8), (2, 16), (4, 128), (3, 64)])
def test_attention_by_products_equals_operators_that_it_replaces(dtype, heads, channels):
    case, exact = (ProductCase(kind, heads, channels, "cuda") for kind in (dtype, torch.float32))
    exact.both, exact.queries, exact.weight = (part.float() for part in (case.both, case.queries, case.weight))

    assert attention.can_attend_products(case.both, heads, case.edges)
    assert_close([part.float() for part in case.run(attention._AttendProducts.apply)], exact.run(compose_products),
                 dtype)  # fmt: skip
    if dtype == torch.float32:
        assert_close(case.run(attention._AttendProducts.apply, again=True), exact.run(compose_products, again=True),
                     dtype)  # fmt: skip


def test_captured_graphs_place_relations_as_others(real_device):
    given = [5, 0, 300], [4, 2, 3], [[0, 2], [1]], [6, 2], real_device

    one, other = (compute_typed_attention.Places.of(*given, is_captured) for is_captured in (False, True))

    assert one.firsts.tolist() == [0, 6, 8]
    assert one.shifts.tolist() == [0, 0, -6]
    assert (one.starts.tolist(), one.sizes.tolist()) == ([0, 6, 4], [4, 3, 2])
    assert one.target_slices.tolist() == [0, 2, 3, 5]
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.gpu
def test_gradients_are_equal_to_the_last_bit(graph):
    batch = convert(draw_batch(graph, "cuda"), torch.bfloat16)
    model = RGAT(batch, CLASSES, HIDDEN).cuda()
    accelerate(model)

    (out, one), (again, other) = (differentiate(model, batch, torch.bfloat16) for _ in range(2))

    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)
