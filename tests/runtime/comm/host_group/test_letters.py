"""Letters reach their receivers, and are fetched only from a folder of the same user."""

import os
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyg_direct.errors import PygDirectError
from pyg_direct.runtime.comm import host_group
from pyg_direct.runtime.comm.host_group import fetch_letter, open_desk


def test_each_fetches_its_letter():
    given, found = {1: b"", 2: b"x" * 1_000_000, 5: b"five"}, {}

    with open_desk() as desk:
        readers = [threading.Thread(target=lambda n=n: found.update({n: fetch_letter(desk.path, n)})) for n in given]
        for reader in readers:
            reader.start()
        desk.hand_out(given)
        for reader in readers:
            reader.join()

    assert found == given
    assert not os.path.exists(desk.path)


def test_the_folder_of_a_desk_is_closed_to_others():
    with open_desk() as desk:
        assert os.stat(os.path.dirname(desk.path)).st_mode & 0o077 == 0


def test_a_desk_that_others_could_have_put_there_is_not_asked():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        os.chmod(folder, 0o770)
        door.bind(f"{folder}/desk")
        door.listen()

        with pytest.raises(PygDirectError, match="letters must lie in a folder that only this user can enter, got"):
            fetch_letter(f"{folder}/desk", 1)


def test_who_does_not_come_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(host_group, "_SECONDS", 0.2)

    with open_desk() as desk, pytest.raises(TimeoutError):
        desk.hand_out({1: b"one"})


def test_who_asks_for_a_letter_of_nobody_hears_that_the_desk_is_closed():
    with open_desk() as desk:
        thread = ThreadPoolExecutor(1)
        asked = thread.submit(fetch_letter, desk.path, 7)
        with pytest.raises(KeyError):
            desk.hand_out({1: b"one"})
        with pytest.raises(ConnectionResetError, match="the other end is gone"):
            asked.result(60)
        thread.shutdown()
