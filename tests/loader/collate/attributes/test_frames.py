"""Attributes that are a `TensorFrame` of PyTorch Frame: tables whose columns have kinds."""

import time
import warnings

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.errors import LoaderWarning
from pyg_direct.loader.prefetch.drivers import hold_for, parts_of
from tests.batches import check_contract, make_data

torch_frame = pytest.importorskip("torch_frame", reason="needs torch_frame", exc_type=ImportError)
from torch_frame.data import MultiEmbeddingTensor, MultiNestedTensor, TensorFrame  # noqa: E402


def make_frame(count):
    rows = torch.arange(count)
    # Row i has i % 3 numbers in the one column, all of them i.
    sizes = rows % 3
    offset = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    nested = MultiNestedTensor(count, 1, rows.repeat_interleave(sizes), offset)
    wide = MultiEmbeddingTensor(count, 1, rows.view(-1, 1) + torch.arange(4) / 8, torch.tensor([0, 4]))
    columns = {
        torch_frame.numerical: rows.view(-1, 1) + torch.arange(2) / 4,
        torch_frame.categorical: rows.view(-1, 1) % 5,
        torch_frame.multicategorical: nested,
        torch_frame.embedding: wide,
        torch_frame.text_tokenized: {"input_ids": nested.clone(), "attention_mask": nested.clone()},
    }
    names = {kind: ["a", "b"] if kind == torch_frame.numerical else [str(kind)] for kind in columns}
    return TensorFrame(columns, names, y=rows % 7)


def with_frames():
    data = make_data(x=None, y=None)
    del data.x, data.y
    data.tf, data.edge_tf = make_frame(70), make_frame(600)
    return data


OPTIONS = {"plain": {}, "disjoint": {"disjoint": True}, "induced": {"subgraph_type": "induced"}}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_frames_follow_their_nodes_and_edges(real_device, name, prefetch):
    data = with_frames()
    loader = NeighborLoader(data, [3, 2], batch_size=16, device=real_device, prefetch=prefetch, **OPTIONS[name])

    for batch in loader:
        # A frame that was freed too early would be overwritten.
        torch.full((1000, 50), -1.0, device=real_device)
        assert batch.tf.device.type == real_device.type
        assert batch.tf.cpu() == data.tf[batch.n_id.cpu()]
        assert batch.edge_tf.cpu() == data.edge_tf[batch.e_id.cpu()]
        if name == "plain":
            check_contract(data, batch, batch.input_id.tolist(), [3, 2])
    assert data.tf == make_frame(70)


def test_frames_are_learned(real_device):
    data, numbers = with_frames(), torch.randn(70, 2).requires_grad_()
    data.tf.feat_dict[torch_frame.numerical] = numbers
    loader = NeighborLoader(data, [3, 2], batch_size=16, device=real_device, prefetch=2)

    for batch in loader:
        rows = batch.tf.feat_dict[torch_frame.numerical]
        # What were made ahead would be made now.
        time.sleep(0.01)
        assert torch.equal(rows.detach().cpu(), numbers.detach()[batch.n_id.cpu()])
        rows.sum().backward()
        with torch.no_grad():
            numbers.sub_(numbers.grad)


@pytest.mark.parametrize("placement", ["auto", "unified"])
def test_tables_of_frames_are_placed_as_other_rows(real_device, placement):
    if real_device.type == "cpu" and placement == "unified":
        placement = "cpu"
    data = with_frames()
    loader = NeighborLoader(data, [3, 2], batch_size=16, device=real_device, placement=placement)
    batch = next(iter(loader))

    # Values of any length stay where they are.
    placed = loader._rows().describe()
    kinds = (torch_frame.numerical, torch_frame.categorical, torch_frame.embedding, "y")
    assert set(placed) == {"edge_attr", *(f"{key}.{kind}" for key in ("tf", "edge_tf") for kind in kinds)}
    assert placed[f"tf.{torch_frame.embedding}"].shape == (70, 4)
    assert batch.tf.cpu() == data.tf[batch.n_id.cpu()]
    assert list(batch.tf.feat_dict) == list(data.tf.feat_dict)
    assert torch.equal(batch.tf.get_col_feat(str(torch_frame.embedding)).values.cpu(),
                       data.tf.feat_dict[torch_frame.embedding].values[batch.n_id.cpu()])  # fmt: skip


@pytest.mark.parametrize("what", ["numbers", "embeddings", "target", "another table"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_writes_to_frames_are_in_the_batches_after_them(real_device, what, prefetch):
    data = with_frames()
    loader = NeighborLoader(data, [3, 2], batch_size=16, device=real_device, prefetch=prefetch)

    with warnings.catch_warnings():
        # Batches that were made ahead are read again, which is told.
        warnings.simplefilter("ignore", LoaderWarning)
        for _ in range(2):
            for batch in loader:
                assert batch.tf.cpu() == data.tf[batch.n_id.cpu()]
                if what == "another table":
                    data.tf.feat_dict[torch_frame.numerical] = data.tf.feat_dict[torch_frame.numerical] + 1
                else:
                    table = {"numbers": data.tf.feat_dict[torch_frame.numerical], "target": data.tf.y,
                             "embeddings": data.tf.feat_dict[torch_frame.embedding].values}[what]  # fmt: skip
                    table.add_(1)


def test_a_frame_without_columns_has_the_rows_that_it_names(real_device):
    data = make_data(x=None, y=None)
    del data.x, data.y
    data.tf = TensorFrame({}, {}, num_rows=70)

    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=16, device=real_device)))

    assert len(batch.tf) == len(batch.n_id)


def test_links_have_frames_too(real_device):
    data = with_frames()

    for batch in LinkNeighborLoader(data, [3], neg_sampling="binary", batch_size=200, device=real_device):
        assert batch.tf.cpu() == data.tf[batch.n_id.cpu()]


def test_types_have_frames_too(real_device):
    data = HeteroData()
    data["a"].tf, data["b"].tf = make_frame(30), make_frame(40)
    data["a", "to", "b"].edge_index = torch.stack([torch.arange(120) % 30, torch.arange(120) % 40])
    data["a", "to", "b"].edge_tf = make_frame(120)

    for batch in NeighborLoader(data, [2], "b", batch_size=7, device=real_device):
        for kind in ("a", "b"):
            assert batch[kind].tf.cpu() == data[kind].tf[batch[kind].n_id.cpu()]
        store = batch["a", "to", "b"]
        assert store.edge_tf.cpu() == data["a", "to", "b"].edge_tf[store.e_id.cpu()]


@pytest.mark.sparse
def test_all_neighbors_give_the_frames_of_pyg(real_device):
    data = with_frames()
    theirs = PygNeighborLoader(data, [-1], batch_size=16)
    ours = NeighborLoader(data, [-1], batch_size=16, device=real_device)

    for batch, expected in zip(ours, theirs, strict=True):
        n_id, other = batch.n_id.cpu(), expected.n_id
        assert batch.tf.cpu()[n_id.argsort()] == expected.tf[other.argsort()]


def test_every_tensor_of_a_frame_is_held(monkeypatch):
    class Held(torch.Tensor):
        streams = ()
        is_cuda = True

        def record_stream(self, stream):
            self.streams = (*self.streams, stream)

    data, held = with_frames(), []

    def keep(tensor):
        held.append(tensor.as_subclass(Held))
        return held[-1]

    frame = data.tf
    for kind, column in frame.feat_dict.items():
        if isinstance(column, torch.Tensor):
            frame.feat_dict[kind] = keep(column)
        for part in column.values() if isinstance(column, dict) else [column]:
            if not isinstance(part, torch.Tensor):
                part.values, part.offset = keep(part.values), keep(part.offset)
    frame.y = keep(frame.y)

    hold_for(data, "stream")

    assert len(held) == len(parts_of(frame)) == 11
    assert all(tensor.streams == ("stream",) for tensor in held)
