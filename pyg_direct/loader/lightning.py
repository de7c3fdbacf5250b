"""`LoaderReportCallback`: times and bytes of a loader's batches beside the metrics that Lightning logs.

Programs with Lightning (extra `lightning`) import this module; the package does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyg_direct.errors import needs_extra
from pyg_direct.loader.batch_report import ReportedLoader, record_all
from pyg_direct.object_text import one_line
from pyg_direct.ops.argument_checks import check_count

with needs_extra("pyg_direct.loader.lightning", "lightning"):
    # Lightning has two names with separate classes, and a program trains with one of them.
    is_old = "lightning" not in sys.modules and ("pytorch_lightning" in sys.modules or find_spec("lightning") is None)
    if not TYPE_CHECKING and is_old and find_spec("pytorch_lightning") is not None:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback


class LoaderReportCallback(Callback):  # type: ignore[misc]
    """Callback of Lightning that logs the report of the training loaders after each epoch, by all loggers.

    It logs the numbers of `LoaderReport.to_dict`. Names begin with `prefix`, as in `loader/seconds/host/wait/p50`. If
    there are several training loaders, their names or numbers follow, as in `loader/papers/num_batches`. Loaders of
    other packages are left out.

    Args:
        prefix: First part of the names.
        last: Batches of an epoch whose times are kept, at least 1; see `record` of a loader.

    Attributes:
        metrics: Numbers of the latest epoch, by name; empty before the first one ends.

    Example:
        ```python
        from pyg_direct.loader.lightning import LoaderReportCallback

        trainer = lightning.Trainer(callbacks=[LoaderReportCallback()])
        ```
    """

    def __init__(self, prefix: str = "loader", last: int = 256) -> None:
        super().__init__()
        check_count("last", last)
        self.prefix, self.last = prefix, last
        self.metrics: dict[str, int | float] = {}

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield from (f"prefix={self.prefix!r}", f"last={self.last}")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the loaders record: Lightning starts the first epoch of a loader before its other hooks."""
        if stage == "fit":
            record_all(self.last)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop the records of the loaders."""
        if stage == "fit":
            record_all(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the records of the loaders: after an exception Lightning may skip `teardown`."""
        record_all(None)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the report of the epoch, and start the record of the next epoch at zero."""
        self.metrics = {}
        for name, loader in _list_loaders(trainer.train_dataloader, self.prefix):
            self.metrics |= {f"{name}/{key}": number for key, number in loader.tell().to_dict().items()}
            loader.record(last=self.last)
        for logger in trainer.loggers if self.metrics else ():
            logger.log_metrics({"epoch": trainer.current_epoch, **self.metrics}, step=trainer.global_step)


def _list_loaders(loaders: Any, name: str) -> Iterator[tuple[str, ReportedLoader]]:
    """List (name, loader) of each loader of this package in the training loaders of Lightning."""
    if isinstance(loaders, ReportedLoader):
        yield name, loaders
    elif isinstance(loaders, Mapping):
        for key, part in loaders.items():
            yield from _list_loaders(part, f"{name}/{key}")
    elif isinstance(loaders, (list, tuple)):
        for place, part in enumerate(loaders):
            yield from _list_loaders(part, f"{name}/{place}")
