"""Steps of a CPU loop are linked into it, and have no machine code of their own."""

import pytest

from tests.interpreter import run_python

COUNT_MODULES = """
import numpy as np
from numba.core import codegen, lowering, registry, runtime
from pyg_direct.kernels.local_ids.sorted_sources import number_sources_cpu
runtime.rtsys.initialize(registry.cpu_target.target_context)
made = []
def finalize_object(library, real=codegen.JITCodeLibrary._finalize_specific):
    made.append(library.name)
    real(library)
codegen.JITCodeLibrary._finalize_specific = finalize_object

def number():
    sources, bases = np.array([3, 1, 3, 2]), np.array([0, 8])
    keys, order, spare, spare_order = (np.empty(4, np.int64) for _ in range(4))
    new, new_locals, rows, trees, local_ids, counts = (np.empty(n, np.int64) for n in (4, 4, 4, 0, 4, 2))
    number_sources_cpu(sources, bases, 3, 3, np.array([1]), np.array([0]), np.array([1]), 2, keys, order, spare,
                       spare_order, new, new_locals, rows, trees, local_ids, counts)
    return new[: counts[0]].tolist(), local_ids.tolist()
"""


@pytest.mark.full
def test_a_loop_is_the_only_machine_code_and_has_all_its_steps_when_it_is_read_back(tmp_path):
    outputs = [run_python(COUNT_MODULES + "print(number(), made)", PYG_DIRECT_CACHE=str(tmp_path)) for _ in range(2)]

    assert outputs == ["([2, 3], [2, 0, 2, 1]) ['number_sources_cpu']"] * 2


@pytest.mark.full
def test_a_numba_without_one_of_the_functions_compiles_each_step(tmp_path):
    found = run_python(COUNT_MODULES + """
import builtins
real = hasattr
builtins.hasattr = lambda where, name: name != "create_cfunc_wrapper" and real(where, name)
print(number(), len(made) > 10)
""", PYG_DIRECT_CACHE=str(tmp_path))  # fmt: skip

    assert found == "([2, 3], [2, 0, 2, 1]) True"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.full
def test_functions_of_the_program_are_compiled_as_ever(tmp_path, is_first):
    found = run_python(COUNT_MODULES + f"""
import numba, gc

@numba.njit
def add(a, b):
    return min(a, b) + 1

@numba.njit(parallel=True)
def own(n):
    out = np.zeros(n, np.int64)
    for i in numba.prange(n):
        out[i] = add(i, 5) + np.empty(3, np.int64).shape[0]
    return out.sum()

@numba.njit
def fail(n):
    if n > 2:
        raise ValueError("own", n)
    return n

if {is_first}:
    own(8), fail(1)
number()
if not {is_first}:
    fail(1)
try:
    fail(7)
except ValueError as error:
    print(own(8), error.args, gc.isenabled(), add.overloads[add.signatures[0]].entry_point(3, 9))
""", PYG_DIRECT_CACHE=str(tmp_path))  # fmt: skip

    assert found == "57 ('own', 7) True 4"
