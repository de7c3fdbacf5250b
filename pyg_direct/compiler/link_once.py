"""Machine code of a CPU loop made once, for the loop alone.

Numba makes machine code of each scalar step, although every loop takes the step in. It compiles a step again for each
caller with other options, and optimizes it in three rounds. It also writes wrappers for callers from C and Python.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(where: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object have another attribute for a while."""
    real = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, real)


@contextlib.contextmanager
def linked_once(name: str) -> Iterator[None]:
    """Let Numba make machine code of the loop `name` only, with the steps that it calls linked in.

    Other threads that compile wait meanwhile. A Numba that lacks one of the replaced functions compiles as it does.
    """
    from numba.core import codegen, lowering, targetconfig
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target
    from numba.core.runtime import rtsys
    from numba.core.typing import templates

    with global_compiler_lock, contextlib.ExitStack() as stack:
        context = cpu_target.target_context
        # Numba's own functions for memory are called from everywhere, and stay whole.
        rtsys.initialize(context)
        pieces = _Pieces(name, codegen, lowering, targetconfig.ConfigStack)
        wanted = [
            (codegen.CPUCodeLibrary, "finalize", pieces.finalize),
            (codegen.CPUCodeLibrary, "_optimize_functions", pieces.optimize_functions),
            (codegen.JITCodeLibrary, "get_pointer_to_function", pieces.get_pointer),
            (codegen.JITCPUCodegen, "set_env", pieces.set_env),
            (lowering.BaseLower, "create_cfunc_wrapper", lambda lower: None),
            (lowering.BaseLower, "create_cpython_wrapper", pieces.create_cpython_wrapper),
            (templates._OverloadFunctionTemplate, "_get_impl", pieces.find_step),
        ]
        # Numba before 0.62 has passes of another kind.
        needed = [(where, attribute) for where, attribute, _ in wanted] + [(codegen.CPUCodegen, "_pass_builder")]
        if all(hasattr(where, attribute) for where, attribute in needed):
            for where, attribute, function in wanted:
                stack.enter_context(replaced(where, attribute, _as_method(function)))
        stack.enter_context(_without_collections())
        yield


@contextlib.contextmanager
def readable_is_enough() -> Iterator[None]:
    """Let Numba read its folder of compiled code if it cannot write there, where it would use no folder or another."""
    from numba.core import caching

    def ensure_path(locator: Any) -> None:
        with contextlib.suppress(OSError):
            real(locator)

    real = caching._CacheLocator.ensure_cache_path
    with replaced(caching._CacheLocator, "ensure_cache_path", ensure_path):
        yield


def _as_method(function: Any) -> Any:
    return lambda own, *args, **options: function(own, *args, **options)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage: a compiler allocates much that lives on, and each collection walks through torch and PyG."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Pieces:
    """Libraries of code that a loop takes in, and the steps of Numba with them while the loop is compiled.

    Args:
        name: Of the loop, whose library is no piece.
    """

    def __init__(self, name: str, codegen: Any, lowering: Any, options: Any) -> None:
        self.name, self.options = name, options
        self.real_finalize = codegen.CPUCodeLibrary.finalize
        self.real_pointer = codegen.JITCodeLibrary.get_pointer_to_function
        self.real_set_env = codegen.JITCPUCodegen.set_env
        self.real_wrapper = lowering.BaseLower.create_cpython_wrapper
        self.pieces: weakref.WeakSet[Any] = weakref.WeakSet()
        self.environments: list[tuple[str, Any]] = []

    def finalize(self, library: Any) -> None:
        """Link a piece with its callees and optimize it, which is all that another library needs of it."""
        if library.name == self.name:
            self.real_finalize(library)
            return
        library._raise_if_finalized()
        for called in dict.fromkeys(library._linking_libraries):
            library._reload_init.update(called._reload_init)
            library._final_module.link_in(called._get_module_for_linking(), preserve=True)
        # Without this, some loops take up to 1.6 times as long: those of a step are best optimized before its caller.
        passes, builder = library._codegen._module_pass_manager()
        passes.run(library._final_module, builder)
        library._finalize_dynamic_globals()
        library._finalized = True
        self.pieces.add(library)

    def optimize_functions(self, library: Any, module: Any) -> None:
        """Optimize nothing yet: passes over the whole module follow."""
        module.data_layout = library._codegen._data_layout

    def get_pointer(self, library: Any, name: str) -> int:
        """Address of a function; 0, as of a function that is nowhere, for one of a piece."""
        library._ensure_finalized()
        return 0 if library in self.pieces else int(self.real_pointer(library, name))

    def set_env(self, codegen: Any, name: str, environment: Any) -> None:
        """Note the address of a step's Python objects: the loop's machine code has a place for it once it is made."""
        self.environments.append((name, environment))
        left = []
        for name, environment in self.environments:
            if codegen._engine.get_global_value_address(name):
                self.real_set_env(codegen, name, environment)
            else:
                left.append((name, environment))
        self.environments = left

    def create_cpython_wrapper(self, lower: Any, release_gil: bool = False) -> None:
        """Write the wrapper that Python calls, for the loop alone."""
        if lower.library.name == self.name:
            self.real_wrapper(lower, release_gil=release_gil)

    def find_step(self, template: Any, args: Any, kws: Any) -> Any:
        """Find the compiled step for types of arguments, and for the options that a step takes over from its caller."""
        own = self.options.top_or_none()
        taken = None if own is None else (str(own.fastmath), own.error_model, own.forceinline, own.nrt)
        key = template.context, tuple(args), tuple(kws.items()), taken
        known = template._impl_cache.get(key)
        return template._build_impl(key, args, kws) if known is None else known
