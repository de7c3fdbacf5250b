"""Threads of OpenMP under Numba's loops: they wait for the next loop awake, though not for long.

GNU OpenMP, which serves Numba on Linux, does not survive forking: a child has none of the threads it would wait for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Rounds of waiting awake, a tenth of a millisecond: most loops of a batch follow sooner. GNU OpenMP's own ten
# milliseconds would be lost to all other programs on the same cores.
_ROUNDS = "3000"
_is_orphaned = False


def load() -> bool:
    """Load Numba's OpenMP layer with the library behind it; False if either is missing."""
    # The library reads its settings from the environment while it is loaded; settings of the user go first.
    is_set = bool({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ))
    if not is_set:
        os.environ["GOMP_SPINCOUNT"] = _ROUNDS
    try:
        with _bound_to_its_own():
            importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    finally:
        if not is_set:
            del os.environ["GOMP_SPINCOUNT"]
    return True


@contextlib.contextmanager
def _bound_to_its_own() -> Iterator[None]:
    """Let libraries loaded here find the library that they name, rather than the copy that torch brings.

    Threads of that copy wait awake for as long as the environment said when torch was imported.
    """
    if not hasattr(os, "RTLD_DEEPBIND"):
        yield
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)


def is_orphaned() -> bool:
    """Report whether this process was forked from one whose threads of OpenMP it does not have."""
    return _is_orphaned


def _note_fork() -> None:
    _renew_locks()
    global _is_orphaned
    numba = sys.modules.get("numba")
    # Numba names no layer before it has started its threads.
    with contextlib.suppress(ValueError, AttributeError):
        _is_orphaned |= sys.platform == "linux" and numba is not None and numba.threading_layer() == "omp"


def _renew_locks() -> None:
    """Give a child the locks of its own under which Numba starts its threads.

    Processes that were forked from one share a semaphore as their lock. If one is killed while it starts threads, it
    would hold the semaphore for ever.
    """
    parallel: Any = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is not None and hasattr(parallel, "_backend_init_process_lock"):
        # Made anew when it is needed.
        parallel._backend_init_process_lock = None
        parallel._backend_init_thread_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
