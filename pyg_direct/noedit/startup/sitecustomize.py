"""Start-up of a Python process that a program under `run` has started: PyG's loader classes create ours there, too.

`run` puts this folder first into `PYTHONPATH`. So Python executes this file at the start of all child processes. These
may be spawned by `multiprocessing`, workers of pools, or other programs such as the ranks of torchrun and Lightning.
Nothing is imported before the process imports PyG. A process that does not import PyG, or that runs in another
environment, does not change.
"""

from __future__ import annotations

import json
import os
import sys

# The import of typing would delay the start of every process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
# Our package imports PyG in modules that depend on each other: the installation must precede the first of them.
_WATCHED = ("torch_geometric", "pyg_direct")


class _Watch:
    """Finder of modules that runs `_start` after the first import of PyG, or of this package."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as Python does; None unless it is watched."""
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
        from pyg_direct.noedit.install import follow_processes, start
    except ModuleNotFoundError as error:
        if error.name != "pyg_direct":
            raise
        # For example if `run` was started in the folder of the package.
        sys.path.append(_ROOT)
        from pyg_direct.noedit.install import follow_processes, start
    start(**options)
    follow_processes()


def _execute_next() -> None:
    """Remove this folder from the path, and execute the `sitecustomize` that Python would have found without it."""
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
