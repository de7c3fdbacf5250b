"""Start of a Python process that a program under `run` has started: PyG's loaders make ours there, too.

`run` puts this folder first into `PYTHONPATH`, so that Python executes this file as it starts, in all that the program
starts: processes that `multiprocessing` spawns, pools, other programs such as the ranks of torchrun and Lightning.
Nothing is imported before the process imports PyG; one that does not, or that is of another environment, is left alone.
"""

from __future__ import annotations

import json
import os
import sys

# Typing would be the first thing that a process waits for.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
# Our package imports PyG in rooms that need each other: the start must come before the first of them.
_WATCHED = ("torch_geometric", "pyg_direct")


class _Watch:
    """Finder of modules that lets `_start` follow the first import of PyG, or of this package."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as Python does; None but for those that are watched."""
        if name not in _WATCHED:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def execute_and_start(module: ModuleType) -> None:
            execute(module)
            _start(self.options)

        spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


def _start(options: dict[str, Any]) -> None:
    try:
        from pyg_direct.noedit.install import start
    except ModuleNotFoundError as error:
        if error.name != "pyg_direct":
            raise
        # As where `run` was started in the folder of the package.
        sys.path.append(_ROOT)
        from pyg_direct.noedit.install import start
    start(**options)


def _execute_next() -> None:
    """Take this folder off the path, and execute the file of this name that Python would have found without it."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    spec = PathFinder.find_spec(__name__)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


_given = json.loads(os.environ.get("PYG_DIRECT_RUN") or "{}")
if _given.get("prefix") == sys.prefix:
    sys.meta_path.insert(0, _Watch(_given["options"]))
_execute_next()
