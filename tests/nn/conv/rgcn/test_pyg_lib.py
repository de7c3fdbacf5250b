"""RGCNConv with pyg-lib's product of segments: means are then of other edges than without."""

import copy
import itertools

import pytest
import torch
import torch_geometric
from torch_geometric.nn import RGCNConv
from torch_geometric.nn.conv import rgcn_conv

from pyg_direct import accelerate
from pyg_direct.nn.conv import rgcn
from tests.nn.convolutions import assert_near
from tests.nn.test_trimming import Batch

WIDTH, OUT, RELATIONS = 8, 12, 4


class Segments:
    """Fake of pyg-lib's call by PyG, relation after relation."""

    def __init__(self):
        self.ops, self.calls = self, 0

    def segment_matmul(self, rows, ptr, weight):
        self.calls += 1
        return torch.cat([rows[a:b] @ weight[i] for i, (a, b) in enumerate(itertools.pairwise(ptr))])


@pytest.fixture
def segments(monkeypatch):
    made = Segments()
    monkeypatch.setattr(torch_geometric.typing, "WITH_SEGMM", True)
    monkeypatch.setattr(rgcn_conv, "pyg_lib", made)
    return made


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize(("asked", "advised"), [(True, None), (None, True), (False, None), (None, False)])
def test_results_are_those_of_the_way_that_pyg_takes(reduce, asked, advised, segments, monkeypatch):
    looked = []

    def advise(relations, most, in_channels, out_channels):
        looked.append((relations, int(most), in_channels, out_channels))
        return advised

    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", asked)
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul_heuristic",
                        lambda num_segments, max_segment_size, in_channels, out_channels:
                        advise(num_segments, max_segment_size, in_channels, out_channels))  # fmt: skip
    sums = []
    aggregate = rgcn.aggregate
    monkeypatch.setattr(rgcn, "aggregate", lambda *args, **kwargs: sums.append(1) or aggregate(*args, **kwargs))
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS, aggr=reduce)
    edge_type = torch.randint(RELATIONS, (batch.edge_index.shape[1],))
    expected = conv(batch.x, batch.edge_index, edge_type)
    takes_segments, before = bool(asked or advised), segments.calls
    assert before == int(takes_segments)
    fast = copy.deepcopy(conv)
    accelerate(fast)

    got = fast(batch.x, batch.edge_index, edge_type)

    assert_near([got], [expected])
    assert len(sums) == int(reduce == "sum" or not takes_segments)
    assert segments.calls - before == int(not sums)
    # PyG's advice is asked with PyG's figures.
    assert len(set(looked)) == int(asked is None)


@pytest.mark.parametrize("options", [{"num_bases": 2}, {"num_blocks": 4}])
def test_bases_and_blocks_never_take_segments(options, segments, monkeypatch):
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", True)
    batch, conv = Batch(), RGCNConv(WIDTH, OUT, RELATIONS, **options)
    edge_type = torch.randint(RELATIONS, (batch.edge_index.shape[1],))
    expected = conv(batch.x, batch.edge_index, edge_type)
    accelerate(conv)
    monkeypatch.setattr(type(conv), "forward", None)

    assert_near([conv(batch.x, batch.edge_index, edge_type)], [expected])
    assert segments.calls == 0
