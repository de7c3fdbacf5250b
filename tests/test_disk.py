"""Files kept on disk between runs."""

import functools
import json
import os
import threading
from pathlib import Path

import pytest

from pyg_direct import cache_folder
from pyg_direct.cache_folder import cache_root, recall, write_whole
from tests.interpreter import run_together


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def is_number(value):
    return isinstance(value, int)


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "own"))
    own = cache_root()
    monkeypatch.delenv("PYG_DIRECT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    assert own == tmp_path / "own"
    assert cache_root() == tmp_path / "xdg" / "pyg_direct"


@pytest.mark.parametrize("name", ["cache", "~/cache"])
def test_the_folder_stays_where_it_was_whichever_one_a_program_is_in(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("PYG_DIRECT_CACHE", name)
    monkeypatch.setattr(cache_folder, "_settle", functools.cache(cache_folder._settle.__wrapped__))
    monkeypatch.chdir(tmp_path)
    begun = cache_root()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")

    assert begun == cache_root() == tmp_path / "cache"


def test_a_folder_of_caches_that_is_relative_says_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("PYG_DIRECT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))

    assert cache_root() == tmp_path / ".cache" / "pyg_direct"


def test_a_user_whom_nobody_knows_has_the_root_for_a_home(monkeypatch):
    monkeypatch.delenv("PYG_DIRECT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # `expanduser` returns its argument if the user is unknown.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)

    assert cache_root() == Path(os.path.abspath(os.sep), ".cache", "pyg_direct")


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_what_is_written_whole_has_the_rights_of_a_new_file(tmp_path, mask, rights):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "rows.json", "first")
        write_whole(tmp_path / "rows.json", "second")
    finally:
        os.umask(before)

    assert (tmp_path / "rows.json").stat().st_mode & 0o777 == rights
    assert (tmp_path / "rows.json").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_fact_is_measured_once_for_each_key(root):
    values = iter(range(10))

    got = [recall("rates", key, lambda: next(values), is_number) for key in ("a", "b", "a", "b")]

    assert got == [0, 1, 0, 1]
    assert json.loads((root / "rates.json").read_text()) == {"a": 0, "b": 1}


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", '{"a": "7"}', '{"b": 7}'])
def test_what_cannot_be_used_is_measured_again(root, text):
    root.mkdir()
    (root / "rates.json").write_text(text)

    assert recall("rates", "a", lambda: 3, is_number) == 3
    assert json.loads((root / "rates.json").read_text())["a"] == 3


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYG_DIRECT_CACHE", str(tmp_path / "file" / "below"))

    assert recall("rates", "a", lambda: 3, is_number) == 3


def test_a_measurement_that_fails_leaves_nothing(root):
    with pytest.raises(ZeroDivisionError):
        recall("rates", "a", lambda: 1 // 0, is_number)

    # A file that others wait at may stay.
    assert {path.name for path in root.iterdir()} <= {"rates.json.lock"}
    assert recall("rates", "a", lambda: 3, is_number) == 3


MEASURE_SLOWLY = """
import os
import time
from pathlib import Path
from pyg_direct.cache_folder import recall


def measure():
    with Path(os.environ["MEASURED"]).open("a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    return os.getpid()


print(recall("rates", "a", measure, lambda value: isinstance(value, int)))
"""


def test_processes_that_start_at_once_measure_once(tmp_path):
    log = tmp_path / "log"

    found = run_together(4, MEASURE_SLOWLY, PYG_DIRECT_CACHE=str(tmp_path / "cache"), MEASURED=str(log))

    assert found == 4 * [log.read_text().strip()]


def test_what_others_wrote_while_this_was_measured_stays(root):
    def measure():
        # As if no lock were possible.
        (root / "rates.json").write_text('{"b": 7}')
        return 3

    assert recall("rates", "a", measure, is_number) == 3
    assert json.loads((root / "rates.json").read_text()) == {"a": 3, "b": 7}


def test_facts_of_threads_are_all_kept(root):
    start = threading.Barrier(8)

    def measure(number):
        start.wait()
        recall("rates", str(number), lambda: number, is_number)

    threads = [threading.Thread(target=measure, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert json.loads((root / "rates.json").read_text()) == {str(number): number for number in range(8)}


def test_readers_see_all_of_a_file_or_none_of_it(tmp_path):
    path, texts = tmp_path / "file", ["a" * 100_000, "b" * 100_000]
    write_whole(path, texts[0])
    writer = threading.Thread(target=lambda: [write_whole(path, texts[n % 2]) for n in range(50)])
    writer.start()

    seen = {path.read_text() for _ in range(200)}
    writer.join()

    assert seen <= set(texts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)

    with pytest.raises(PermissionError):
        write_whole(tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_whole_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "facts", "half of it \ud800")

    assert list(tmp_path.iterdir()) == []
