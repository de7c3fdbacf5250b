"""Models with PyTorch Frame's encoders over the tables of a batch: replayed, with results of ordinary passes."""

import copy

import pytest
import torch
from torch_geometric.nn import HeteroConv, SAGEConv

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.nn.replay import batch_passes
from tests.hetero_data import make_hetero
from tests.nn.convolutions import assert_near
from tests.nn.replays import record_anywhere

torch_frame = pytest.importorskip("torch_frame", reason="needs torch_frame", exc_type=ImportError)
from torch_frame import NAStrategy, TensorFrame, nn, stype  # noqa: E402
from torch_frame.data import MultiEmbeddingTensor  # noqa: E402
from torch_frame.data.stats import StatType  # noqa: E402

KINDS = ("paper", "author")
WIDTH, FIRST = 8, torch.tensor([2000, 0, 0, 0, 0, 0, 0])
ENCODERS = {stype.numerical: nn.LinearEncoder, stype.categorical: nn.EmbeddingEncoder,
            stype.embedding: nn.LinearEmbeddingEncoder, stype.timestamp: nn.TimestampEncoder}  # fmt: skip
# With the default for numbers, ordinary gradients are not numbers.
MISSING = {stype.numerical: NAStrategy.MEAN, stype.timestamp: NAStrategy.MEDIAN_TIMESTAMP}
STATS = {
    "number": {StatType.MEAN: 0.0, StatType.STD: 1.0},
    "kind": {StatType.COUNT: (list(range(5)), [1] * 5)},
    "text": {StatType.EMB_DIM: 6},
    "day": {StatType.YEAR_RANGE: [2000, 2010], StatType.MEDIAN_TIME: FIRST + 1},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*no edges|.*isolated:UserWarning")


@pytest.fixture
def device(real_device, monkeypatch):
    record_anywhere(real_device, monkeypatch)
    monkeypatch.setattr(batch_passes, "_MARGIN", 0.5)
    return real_device


def make_table(count):
    """Make columns of each kind, in which values are missing."""
    numbers, kinds = torch.randn(count, 2), torch.randint(-1, 5, (count, 1))
    numbers[::3, 1] = torch.nan
    days = FIRST + (torch.rand(count, 1, 7) * 5).long()
    days[::4] = -1
    texts = MultiEmbeddingTensor(count, 2, torch.randn(count, 12), torch.tensor([0, 6, 12]))
    columns = {stype.numerical: numbers, stype.categorical: kinds, stype.embedding: texts, stype.timestamp: days}
    names = {stype.numerical: ["a", "b"], stype.categorical: ["kind"], stype.embedding: ["c", "d"],
             stype.timestamp: ["day"]}  # fmt: skip
    return TensorFrame(columns, names, y=torch.arange(count) if count % 2 else None)


def make_stats():
    return {"a": STATS["number"], "b": STATS["number"], "kind": STATS["kind"], "c": STATS["text"],
            "d": STATS["text"], "day": STATS["day"]}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    data = make_hetero()
    for kind in KINDS:
        data[kind].tf = make_table(data[kind].num_nodes)
    return data


def list_batches(data, device, epochs=8):
    loader = NeighborLoader(data, [3, 2], ("paper", torch.arange(40)), batch_size=8, seed=0, device=device,
                            shuffle=True, drop_last=True)  # fmt: skip
    return [batch for _ in range(epochs) for batch in loader]


class Tables(torch.nn.Module):
    def __init__(self, data):
        super().__init__()
        self.encoders = torch.nn.ModuleDict({
            kind: nn.StypeWiseFeatureEncoder(WIDTH, make_stats(), data[kind].tf.col_names_dict,
                                             {column: make(na_strategy=MISSING.get(column))
                                              for column, make in ENCODERS.items()})
            for kind in KINDS
        })  # fmt: skip
        self.conv = HeteroConv({kind: SAGEConv(WIDTH, WIDTH) for kind in data.edge_types
                                if kind[0] in KINDS and kind[-1] in KINDS}, aggr="sum")  # fmt: skip

    def forward(self, batch):
        x = {kind: self.encoders[kind](frame)[0].sum(1) for kind, frame in batch.tf_dict.items()}
        return self.conv(x, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]


def make_pair(data, device, replay):
    torch.manual_seed(1)
    model = Tables(data).to(device)
    ordinary = copy.deepcopy(model)
    accelerate(ordinary, replay=False)
    return ordinary, model, accelerate(model, replay=replay).replay


def find_gradients(model, batch):
    model.zero_grad()
    out = model(batch)
    out.square().sum().backward()
    return [out.detach(), *(part.grad for part in model.parameters() if part.grad is not None)]


@pytest.mark.parametrize("replay", [True, "auto"])
def test_tables_with_missing_values_are_replayed(device, data, replay):
    ordinary, model, found = make_pair(data, device, replay)

    for batch in list_batches(data, device):
        assert_near(find_gradients(model, batch), find_gradients(ordinary, batch))

    assert found.reason is None
    assert found.replayed >= 12


def test_a_value_that_an_encoder_refuses_is_refused(device, data):
    _, model, found = make_pair(data, device, "auto")
    batches = list_batches(data, device)
    for batch in batches[:-1]:
        find_gradients(model, batch)
    before = found.replayed

    days = batches[-1]["paper"].tf.feat_dict[stype.timestamp]
    days[-1, 0, 1:] = 100
    with pytest.raises(AssertionError):
        find_gradients(model, batches[-1])

    assert found.replayed == before > 0
