"""Lightning logs the reports of loaders after each epoch."""

import importlib.util

import pytest
import torch
from torch_geometric.nn import SAGEConv

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.loader.batch_report import record_all
from tests.batches import make_data

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def logged():
    return []


@pytest.fixture
def train(logged):
    """Train for some epochs over loaders that the module makes; returns the callback."""
    import lightning
    from lightning.pytorch.loggers import Logger

    from pyg_direct.loader.lightning import LoaderReportCallback

    class Kept(Logger):
        name, version = "kept", 0

        def log_metrics(self, metrics, step=None):
            logged.append((step, metrics))

        def log_hyperparams(self, *args, **kwargs):
            pass

    class Module(lightning.LightningModule):
        def __init__(self, make_loaders, fails):
            super().__init__()
            self.make_loaders, self.fails = make_loaders, fails
            self.conv = SAGEConv(make_data().num_features, 4)

        def train_dataloader(self):
            return self.make_loaders()

        def training_step(self, batch, _):
            if self.fails:
                raise ValueError("a step that fails")
            first = next(iter(batch.values())) if isinstance(batch, dict) else batch
            return self.conv(first.x, first.edge_index).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def train(make_loaders, epochs=1, fails=False, **options):
        callback = LoaderReportCallback(**options)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=Kept(), callbacks=[callback], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(make_loaders, fails))
        return callback

    return train


def make_loader():
    return NeighborLoader(make_data(), [3, 2], batch_size=64, device="cpu")


def test_each_epoch_is_logged_with_its_own_batches(train, logged):
    loader = make_loader()

    callback = train(lambda: loader, epochs=3)

    found = [(metrics["epoch"], metrics["loader/num_batches"]) for _, metrics in logged if "epoch" in metrics]
    assert found == [(epoch, len(loader)) for epoch in range(3)]
    assert [step for step, _ in logged] == [len(loader) * epoch for epoch in (1, 2, 3)]
    rows = [metrics["loader/features/x/num_read"] for _, metrics in logged]
    assert min(rows) > 0
    assert callback.metrics["loader/seconds/host/wait/sum"] > 0


def test_loaders_are_named_and_those_of_others_left_out(train):
    data = make_data()
    others = torch.utils.data.DataLoader([data] * 3, collate_fn=lambda batch: batch[0])

    callback = train(lambda: {"near": make_loader(), "far": others}, prefix="batches")

    assert {name.split("/")[1] for name in callback.metrics} == {"near"}
    assert callback.metrics["batches/near/num_batches"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_loaders_record_no_more_afterwards(train, fails):
    loader = make_loader()

    if fails:
        with pytest.raises(ValueError, match="a step that fails"):
            train(lambda: loader, fails=True)
    else:
        train(lambda: loader)

    list(loader)
    assert loader.tell().num_batches == 0


def test_a_loader_that_recorded_before_goes_on():
    loader = make_loader()
    loader.record()
    record_all(8)
    list(loader)

    record_all(None)

    list(loader)
    assert loader.tell().num_batches == 2 * len(loader)


def test_last_must_be_a_number_of_batches():
    from pyg_direct.loader.lightning import LoaderReportCallback

    with pytest.raises(ArgumentError, match="last must be an integer of at least 1, got 0"):
        LoaderReportCallback(last=0)


def test_the_callback_tells_its_options():
    from pyg_direct.loader.lightning import LoaderReportCallback

    assert repr(LoaderReportCallback(last=9)) == "LoaderReportCallback(prefix='loader', last=9)"
