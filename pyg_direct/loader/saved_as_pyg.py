"""Objects that a program made under PyG's name: they are pickled as PyG's classes, and load without this package."""

from __future__ import annotations

import copy
import copyreg
from typing import Any


class SavedAsPyg:
    """An object with the attributes of a PyG class, as which it is pickled if a program made it under that name.

    Copies stay ours. A class lists in `_BEYOND_PYG` its attributes that PyG's class does not have.
    """

    _BEYOND_PYG: frozenset[str] = frozenset()
    # PyG's class, if a program made the object under its name.
    _pyg_class: type | None = None

    def stand_for(self, pyg_class: type) -> None:
        """Pickle the object as one of PyG's from now on.

        Args:
            pyg_class: The class whose name the program used.
        """
        self._pyg_class = pyg_class

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._pyg_class is None:
            return super().__reduce_ex__(protocol)
        hidden = {*self._BEYOND_PYG, "_pyg_class"}
        state = {name: value for name, value in self.__dict__.items() if name not in hidden}
        # Not `__newobj__`, which `pickle` accepts only for objects of exactly this class.
        return copyreg._reconstructor, (self._pyg_class, object, None), state  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        return copy._reconstruct(self, None, *super().__reduce_ex__(4))  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy._reconstruct(self, memo, *super().__reduce_ex__(4))  # type: ignore[attr-defined]
