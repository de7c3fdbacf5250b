"""The part of `Feature` whose rows go by other ids than their places."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.check import check_ids
from pyg_direct.ops.gather import gather_rows


class NamedRows:
    """What a `Feature` does to name rows; its constructor sets the attributes."""

    device: torch.device
    _order: Tensor | None
    _errors: Tensor | None

    def _filled(self) -> torch.Size:
        raise NotImplementedError

    def set_local_order(self, local_order: Tensor) -> None:
        """Name the rows: from now on the id `local_order[i]` is that of row `i`, as in Quiver.

        Args:
            local_order: int32 or int64 `[N]`, each of 0 to N - 1 once.

        Raises:
            ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; also where there are no rows yet.
        """
        order, num_rows = check_ids("local_order", local_order, self._filled()[0]).cpu().long(), self._filled()[0]
        seen = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
        seen[order] = True
        if len(order) != num_rows or not bool(seen.all()):
            raise ArgumentError(f"local_order must hold each of 0 to {num_rows - 1} once, got {len(order)} ids, "
                                f"{int(seen.sum())} of them different")  # fmt: skip
        # Rows count from 1, so that what is no id, for which a gather gives 0, is none afterwards either.
        place = torch.empty(num_rows, dtype=torch.int64, device="cpu")
        place[order] = torch.arange(1, num_rows + 1, device="cpu")
        self._order = place.to(self.device)

    def _find_rows(self, ids: Tensor) -> Tensor:
        """Places of the rows of ids on `device`; -1 for what is no id, where `set_local_order` named the rows."""
        return ids if self._order is None else gather_rows(self._order, ids, errors=self._errors) - 1
