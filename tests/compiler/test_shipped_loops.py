"""CPU loops that a wheel holds compiled run here as if compiled here, if compiler and processor are the same."""

import inspect
from pathlib import Path

import numpy as np
import pytest
from numba import typeof, types

from pyg_direct.cli.compile_ahead import _import_kernels
from pyg_direct.compiler import jit, shipped_loops
from pyg_direct.compiler.jit import CPU_KERNELS
from pyg_direct.compiler.shipped_loops import (
    FAMILIES,
    foresee_loops,
    name_entry,
    read_parts,
    read_type,
    spell_type,
    write_archive,
)
from pyg_direct.kernels.local_ids.csr import count_rows_cpu
from tests.interpreter import run_python

TITLE, CODES = "local_ids.csr.count_rows_cpu", ("i8[]", "i8", "i8[]")
LISTED = (Path(shipped_loops.__file__).with_name("cpu_loops.txt")).read_text().splitlines()
# Counts the rows of four edges, and how often Numba compiles.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from pyg_direct.compiler import jit, shipped_loops
from pyg_direct.kernels.local_ids.csr import count_rows_cpu
shipped_loops.ARCHIVE = Path(ARCHIVE)
shipped_loops.FAMILIES = {"here": set()}
made, real = [], jit.linked_once
jit.linked_once = lambda name: made.append(name) or real(name)
counts = np.zeros(4, np.int64)
jit.run_alone(True)
count_rows_cpu(np.array([1, 3, 1, 0]), 1, counts)
print(counts.tolist(), made)
"""


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """The code of a loop for this processor, compiled now, under the name of a family."""
    monkeypatch.setattr(jit, "cache_folder", lambda kind: tmp_path)
    monkeypatch.setattr(jit, "CPU_KERNELS", [])
    args = [read_type(code) for code in CODES]
    return {name_entry("here", TITLE, "one", args): jit.CpuKernel(count_rows_cpu._fn).compile("one", args)}


def count_elsewhere(archive, tmp_path, **environment):
    """Run a program that has nothing compiled but this archive."""
    return run_python(f"ARCHIVE = {str(archive)!r}\n" + PROGRAM, PYG_DIRECT_CACHE=str(tmp_path / "cache"),
                      **environment)  # fmt: skip


def test_a_loop_of_the_archive_is_not_compiled(entries, tmp_path):
    write_archive(tmp_path / "loops.zip", entries)

    assert count_elsewhere(tmp_path / "loops.zip", tmp_path) == "[1, 2, 0, 1] []"


def test_a_loop_that_is_missing_in_the_archive_is_compiled(entries, tmp_path):
    write_archive(tmp_path / "loops.zip", {f"{name}0": code for name, code in entries.items()})

    assert count_elsewhere(tmp_path / "loops.zip", tmp_path) == "[1, 2, 0, 1] ['count_rows_cpu']"


def test_without_an_archive_a_loop_is_compiled(tmp_path):
    assert count_elsewhere(tmp_path / "loops.zip", tmp_path) == "[1, 2, 0, 1] ['count_rows_cpu']"


@pytest.mark.parametrize("name", ["source_digest", "importlib.metadata.version"])
def test_an_archive_of_other_sources_or_compilers_is_left_alone(entries, tmp_path, monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.setattr(f"pyg_direct.compiler.shipped_loops.{name}", lambda *_: "0.1")
        write_archive(tmp_path / "loops.zip", entries)

    assert count_elsewhere(tmp_path / "loops.zip", tmp_path) == "[1, 2, 0, 1] ['count_rows_cpu']"


@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME", "PYG_DIRECT_COMPILER"])
def test_a_processor_or_compiler_that_the_user_names_is_compiled_for(entries, tmp_path, setting):
    write_archive(tmp_path / "loops.zip", entries)
    value = {"NUMBA_CPU_NAME": "generic", "PYG_DIRECT_COMPILER": "numba"}[setting]

    assert count_elsewhere(tmp_path / "loops.zip", tmp_path, **{setting: value}).endswith("['count_rows_cpu']")


@pytest.mark.parametrize(
    ("missing", "family"),
    [("", "x86-64-v4"), ("avx512dq", "x86-64-v3"), ("fma", None)],
)
def test_a_family_needs_all_its_instructions(monkeypatch, missing, family):
    instructions = set().union(*FAMILIES.values())
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {n: n != missing for n in instructions})
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(f"numba.config.{name}", None)

    assert shipped_loops._find_family.__wrapped__() == family


def test_constant_arrays_have_code_of_their_own():
    constant = np.zeros(4)
    constant.flags.writeable = False

    assert spell_type(typeof(constant)) == "f8[]r"


@pytest.mark.parametrize("code", ["none", "b1", "i8", "u8", "f4", "i4[]", "f8[,]", "u2[,,]", "i4[]r"])
def test_types_are_read_as_they_are_spelled(code):
    assert spell_type(read_type(code)) == code


def test_types_without_a_spelling_have_no_code_in_the_archive():
    assert spell_type(typeof(np.zeros(4)[::-2])) is None
    assert name_entry("here", TITLE, "one", [types.unicode_type]) is None


def test_the_loops_to_come_are_those_of_the_nearest_program():
    csr, uniform = {"local_ids.csr.count_rows_cpu", "local_ids.csr.place_edges_cpu"}, "sampling.uniform.count_picks_cpu"
    typed = "sampling.hetero.count_items_cpu"

    assert "sampling.uniform.pick_neighbors_cpu" in foresee_loops(uniform, csr)
    assert "rows.gather.gather_typed_cpu" in foresee_loops(typed, {*csr, "local_ids.new_nodes.mark_fresh_cpu"})
    assert not foresee_loops(uniform, csr) & {*csr, uniform}
    assert foresee_loops("somewhere.else_cpu", csr) is None


def test_every_listed_loop_belongs_to_a_program():
    programs = [program for part in read_parts().values() for program in part]

    assert set().union(*programs) == {line.split()[0] for line in LISTED}


def test_listed_loops_exist_with_as_many_arguments():
    _import_kernels()
    kernels = {kernel.title: kernel for kernel in CPU_KERNELS}
    listed = [line.split() for line in LISTED]

    assert sorted(LISTED) == LISTED
    for title, threads, *codes in listed:
        assert len(inspect.signature(kernels[title]).parameters) == len(codes), title
        assert threads in ("one", "all")
        assert [spell_type(read_type(code)) for code in codes] == codes
