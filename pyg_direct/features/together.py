"""Features of short rows that are read by the same ids: labels and masks in one launch instead of one each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyg_direct.features.feature import Feature
from pyg_direct.kernels.state import NO_POSITION
from pyg_direct.ops.narrow import MOST_TABLES, NarrowReader, is_narrow


class ReadTogether:
    """Features whose rows `read` returns by name.

    Args:
        features: Two to `MOST_TABLES` of those that `group_narrow` puts together.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self.names = list(features)
        self._features = list(features.values())
        # What the kernel finds is told by the first of them.
        first, tables = self._features[0], [feature.whole for feature in self._features]
        assert first._errors is not None
        # Through NumPy, as looking at an item of a tensor costs more than the launch of a kernel.
        self._flag = first._errors.numpy()
        self._reader = NarrowReader([table for table in tables if table is not None], first._errors)

    def read(self, ids: Tensor, memory: list[Tensor] | None = None) -> dict[str, Tensor]:
        """Rows of ids that a sampler made, as `Feature.read` returns those of each.

        Args:
            ids: int64 `[n]`, contiguous and where the features are.
            memory: Gets the tensors that the memory of all rows belongs to.
        """
        if self._flag[0] != NO_POSITION:
            self._features[0]._raise_earlier_error()
        if self._features[0]._served is not None:
            for feature in self._features:
                feature._count(ids)
        return dict(zip(self.names, self._reader.read(ids, memory), strict=True))


def group_narrow(features: Mapping[str, Feature]) -> list[ReadTogether]:
    """Those of the features that can be read together, in groups: short rows, all in GPU memory, equally many."""
    fitting: dict[int, list[str]] = {}
    for name, feature in features.items():
        table = feature.whole
        if table is not None and is_narrow(table):
            fitting.setdefault(len(table), []).append(name)
    groups = [names[i : i + MOST_TABLES] for names in fitting.values() for i in range(0, len(names), MOST_TABLES)]
    return [ReadTogether({name: features[name] for name in group}) for group in groups if len(group) > 1]
