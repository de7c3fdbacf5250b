"""Which code a GPU runs, and the version its PTX is stamped with."""

import pytest

from pyg_direct.compiler.nvrtc import PTX_VERSIONS, nearest_target, stamp_version
from pyg_direct.errors import DeviceError

PTX = "//\n// Compiler Build ID\n//\n\n.version 9.4\n.target sm_90\n.address_size 64\n// .version 9.4\n"


@pytest.mark.parametrize(("capability", "target"), [
    ((7, 5), (7, 5)), ((8, 0), (8, 0)), ((8, 6), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((10, 0), (10, 0)),
    ((10, 3), (10, 0)), ((12, 0), (10, 0)), ((12, 1), (10, 0)),
])  # fmt: skip
def test_a_gpu_takes_the_nearest_older_code(capability, target):
    assert nearest_target(capability) == target


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 2)])
def test_gpus_older_than_all_code_are_refused(capability):
    with pytest.raises(
        DeviceError, match=r"device must have compute capability 7\.5 or more, got {}\.{}".format(*capability)
    ):
        nearest_target(capability)


@pytest.mark.parametrize("target", PTX_VERSIONS)
def test_ptx_gets_the_version_of_the_oldest_driver(target):
    got = stamp_version(PTX, target)

    assert got == PTX.replace(".version 9.4", f".version {PTX_VERSIONS[target]}", 1)


def test_ptx_without_a_version_is_our_own_bug():
    with pytest.raises(AssertionError, match="PTX without a version"):
        stamp_version(".target sm_90", (9, 0))
