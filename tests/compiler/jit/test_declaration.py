"""Signatures of GPU kernels and the specialisations they foresee."""

import subprocess
import sys

import pytest

from pyg_direct.compiler.jit import Declaration, GpuCode, Parameter
from tests.interpreter import BARE_PACKAGE

copy = Declaration("copy_gpu", "i8 I[] T[] I[]", {"I": ("i4", "i8"), "T": ("f4",)})


def test_kernel_lists_its_specialisations():
    got = list(copy.specialisations())

    assert got == [{"I": "i4", "T": "f4"}, {"I": "i8", "T": "f4"}]


def test_kernel_chooses_by_the_dtypes_of_its_arguments():
    choice = copy.choose(["", "i8", "f4", "i8"])

    assert choice == {"I": "i8", "T": "f4"}
    assert copy.parameters(choice)[1] == Parameter("i8", is_array=True)


@pytest.mark.parametrize(("dtypes", "words"), [
    (["", "i8", "f4", "i4"], "copy_gpu: I is i8 and i4"),
    (["", "i8", "f8", "i8"], "copy_gpu: T has no variant f8"),
])  # fmt: skip
def test_kernel_refuses_what_it_was_not_declared_for(dtypes, words):
    with pytest.raises(AssertionError, match=words):
        copy.choose(dtypes)


def test_kernel_chooses_also_where_python_leaves_assertions_out():
    text = """
from pyg_direct.compiler.jit import Declaration
print(__debug__, Declaration("copy_gpu", "i8 I[]", {"I": ("i4", "i8")}).choose(["", "i8"]))
"""

    done = subprocess.run([sys.executable, "-O", "-c", BARE_PACKAGE + text], capture_output=True, text=True, check=True)

    assert done.stdout == "False {'I': 'i8'}\n"


def test_every_specialisation_has_a_file_of_its_own():
    targets = [(7, 5), (10, 0)]

    names = {copy.file_name(target, choice) for target in targets for choice in copy.specialisations()}

    assert names == {"copy_gpu-Ii4-Tf4-sm75.ptx", "copy_gpu-Ii8-Tf4-sm75.ptx",
                     "copy_gpu-Ii4-Tf4-sm100.ptx", "copy_gpu-Ii8-Tf4-sm100.ptx"}  # fmt: skip


def test_code_knows_its_entry():
    code = GpuCode(".version 8.0\n.visible .entry _Z4copy(\n.param .u64 a\n)")

    assert code.entry == "_Z4copy"
