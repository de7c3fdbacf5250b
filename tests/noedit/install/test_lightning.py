"""PyG's Lightning data modules work with our samplers and loaders."""

import importlib.util

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_direct
from pyg_direct.sampler import NeighborSampler
from tests.graphs import make_random_graph

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None and importlib.util.find_spec("pytorch_lightning") is None,
    reason="needs lightning",
)


@pytest.fixture
def data():
    graph = make_random_graph(70, 600)
    mask = torch.arange(70) < 40
    return Data(x=torch.randn(70, 3), y=torch.arange(70), edge_index=graph.edge_index, train_mask=mask, val_mask=~mask)


@pytest.fixture
def _one_process():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_node_data_takes_our_sampler(data):
    from torch_geometric.data.lightning import LightningNodeData

    module = LightningNodeData(data, node_sampler=NeighborSampler(data, [3], device="cpu"), batch_size=16,
                               eval_loader_kwargs={"num_neighbors": [-1]})  # fmt: skip

    counts = [sum(batch.num_sampled_edges[0] for batch in loader())
              for loader in (module.train_dataloader, module.val_dataloader)]  # fmt: skip

    assert counts[0] <= 3 * 40
    assert counts[1] == int(data.val_mask[data.edge_index[1]].sum())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_installed")
def test_node_data_is_made_of_ours_without_an_edit(data):
    from torch_geometric.data.lightning import LightningNodeData

    module = LightningNodeData(data, loader="neighbor", num_neighbors=[3], batch_size=16)
    loader = module.train_dataloader()

    assert type(loader) is pyg_direct.NodeLoader
    assert sum(batch.batch_size for batch in loader) == 40


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_installed")
def test_link_data_is_made_of_ours_without_an_edit(data):
    from torch_geometric.data.lightning import LightningLinkData

    module = LightningLinkData(data, input_train_edges=data.edge_index[:, :50], loader="link_neighbor",
                               num_neighbors=[3], batch_size=16, neg_sampling="binary")  # fmt: skip
    loader = module.train_dataloader()
    batches = list(loader)

    assert type(loader) is pyg_direct.LinkLoader
    assert sum(int((batch.edge_label > 0).sum()) for batch in batches) == 50
    assert sum(int((batch.edge_label == 0).sum()) for batch in batches) == 50


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_from_our_batches(data, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    from torch_geometric.data.lightning import LightningNodeData
    from torch_geometric.nn import SAGEConv

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.conv, self.seen = SAGEConv(3, 70), []

        def training_step(self, batch, _):
            self.seen += batch.n_id[: batch.batch_size].tolist()
            out = self.conv(batch.x, batch.edge_index)[: batch.batch_size]
            return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = LightningNodeData(data, node_sampler=NeighborSampler(data, [3], device="cpu"), batch_size=16)
    model = Model()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, default_root_dir=tmp_path, limit_val_batches=0)  # fmt: skip
    trainer.fit(model, module)

    assert sorted(model.seen) == list(range(40))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_installed", "_one_process")
def test_a_trainer_of_processes_trains_on_a_graph_with_types_without_an_edit(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    from torch_geometric.data.lightning import LightningNodeData

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen, self.tested = torch.nn.Linear(3, 4), [], []

        def training_step(self, batch, _):
            # Rows come from the tensor of the program, not from a copy.
            self.trainer.datamodule.data["paper"].x.add_(1)
            paper = batch["paper"]
            self.seen += paper.n_id[: paper.batch_size].tolist()
            return torch.nn.functional.cross_entropy(self.layer(paper.x), paper.y)

        def test_step(self, batch):
            paper = batch["paper"]
            self.tested.append((paper.n_id, paper.x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    data = HeteroData()
    mask = torch.arange(40) < 30
    data["paper"].update(x=torch.randint(9, (40, 3)).float(), y=torch.arange(40) % 4, train_mask=mask, test_mask=~mask)
    data["author"].x = torch.randn(20, 3)
    data["author", "writes", "paper"].edge_index = torch.stack([torch.arange(80) % 20, torch.arange(80) % 40])
    module = LightningNodeData(data, loader="neighbor", num_neighbors=[5], batch_size=8, num_workers=3)
    model = Model()
    strategy = lightning.strategies.DDPStrategy(accelerator="cpu", process_group_backend="gloo")
    trainer = lightning.Trainer(strategy=strategy, devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, default_root_dir=tmp_path)  # fmt: skip
    before = data["paper"].x.clone()
    trainer.fit(model, module)
    trainer.test(model, module, verbose=False)

    assert type(module.train_dataloader()) is pyg_direct.NodeLoader
    assert sorted(model.seen) == sorted([*range(30)] * 2)
    assert torch.equal(data["paper"].x, before + 8)
    assert torch.cat([n_id for n_id, _ in model.tested]).unique().tolist() == list(range(30, 40))
    assert all(torch.equal(x, data["paper"].x[n_id]) for n_id, x in model.tested)
