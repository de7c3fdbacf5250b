"""Train GraphSAGE on all GPUs of this host with Lightning's DDP; needs `pip install lightning`.

    python examples/multi_gpu_lightning.py

The loaders divide the batches themselves, so Lightning must not replace their samplers. On a machine without a GPU,
`--processes 2` trains on the CPU. Data as in `ogbn_products_sage.py`.
"""

import argparse

import torch
import torch.nn.functional as F
from model import at_least_one, classify_seeds, count_processes, describe, load_dataset, parse
from torch_geometric.nn import GraphSAGE

from pyg_direct import NeighborLoader
from pyg_direct.datasets import NodeDataset

try:
    import lightning
except ModuleNotFoundError:
    # `--help` works without it.
    lightning = None


class Module(lightning.LightningModule if lightning else torch.nn.Module):
    def __init__(self, dataset: NodeDataset, args: argparse.Namespace) -> None:
        super().__init__()
        self.dataset, self.args = dataset, args
        self.data = dataset.to_data()
        self.model = GraphSAGE(dataset.num_features, 64, num_layers=3, out_channels=dataset.num_classes, dropout=0.3)

    def make_loader(self, nodes: torch.Tensor, **options) -> NeighborLoader:
        # The process group exists by now: the loader takes its rank and size.
        return NeighborLoader(self.data, [15, 10, 5], nodes, batch_size=self.args.batch_size, seed=self.args.seed,
                              device=self.device, ranks="auto", **options)  # fmt: skip

    def train_dataloader(self) -> NeighborLoader:
        return self.make_loader(self.dataset.train_idx, shuffle=True)

    def val_dataloader(self) -> NeighborLoader:
        return self.make_loader(self.dataset.val_idx)

    def forward(self, batch) -> torch.Tensor:
        return classify_seeds(self.model, batch)

    def training_step(self, batch, _) -> torch.Tensor:
        loss = F.cross_entropy(self(batch), batch.y[: batch.batch_size])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=batch.batch_size, sync_dist=True)
        return loss

    def validation_step(self, batch, _) -> None:
        right = (self(batch).argmax(1) == batch.y[: batch.batch_size]).float().mean()
        self.log("valid", right, batch_size=batch.batch_size, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            print("epoch {}: loss {loss:.4f}, valid {valid:.2%}".format(self.current_epoch + 1, **metrics))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def main() -> None:
    parser = parse(__doc__, epochs=6, batch_size=256)
    parser.add_argument("--processes", type=at_least_one, help="all GPUs; one on a CPU")
    args = parser.parse_args()
    if lightning is None:
        parser.error("this example needs the package lightning: pip install lightning")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, count = args.device == "cuda", count_processes(args.processes, args.device)
    dataset = load_dataset(args.data, args.scale, torch.device(args.device))
    print(describe(dataset, torch.device(args.device)))

    lightning.seed_everything(args.seed)
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=count, max_epochs=args.epochs, use_distributed_sampler=False,
        strategy="ddp_spawn" if count > 1 else "auto", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(dataset, args))


if __name__ == "__main__":
    main()
