"""The archive of PTX in the wheel: found by name, and only while it is current with the sources."""

import pytest

from pyg_direct.compiler import code_cache
from pyg_direct.compiler.code_cache import find_shipped, write_archive

PTX = {"one-sm75.ptx": ".version 8.0\n", "one-sm100.ptx": ".version 8.6\n// \N{GREEK SMALL LETTER MU}\n"}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Where an archive is looked for, instead of beside the kernels."""
    path = tmp_path / "ptx.zip"
    monkeypatch.setattr(code_cache, "ARCHIVE", path)
    monkeypatch.setattr(code_cache, "_open_archive", code_cache._open_archive.__wrapped__)
    return path


def test_archive_gives_what_was_written(archive):
    write_archive(archive, PTX)

    assert {name: find_shipped(name) for name in PTX} == PTX
    assert find_shipped("one-sm90.ptx") is None


def test_no_archive_gives_nothing(archive):
    assert find_shipped("one-sm75.ptx") is None


def test_archive_of_other_sources_gives_nothing(archive, monkeypatch):
    write_archive(archive, PTX)
    monkeypatch.setattr(code_cache, "source_digest", lambda: "edited")

    assert find_shipped("one-sm75.ptx") is None


def test_a_chosen_compiler_is_not_passed_over(archive, monkeypatch):
    write_archive(archive, PTX)
    monkeypatch.setattr(code_cache, "COMPILER", "mlir")

    assert find_shipped("one-sm75.ptx") is None


def test_equal_texts_give_equal_bytes(archive, tmp_path):
    write_archive(archive, PTX)
    write_archive(tmp_path / "again.zip", dict(reversed(PTX.items())))

    assert archive.read_bytes() == (tmp_path / "again.zip").read_bytes()
