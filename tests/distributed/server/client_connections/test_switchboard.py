"""A server has no more lines than it needs, holds no more than it must, and listens where it was told."""

import gc
import time

import psutil
import pytest

from pyg_direct.distributed.server import client_connections, client_connections as switchboard
from pyg_direct.distributed.server.client_connections import LARGE, Lines, Switchboard, can_open
from tests.distributed.lines import HERE, find_here, make_answer, open_line, same
from tests.runtime.comm.formation.test_gloo_sockets import list_listened

pytestmark = pytest.mark.skipif(not can_open(), reason="needs a torch with Gloo")


def count_own():
    gc.collect()
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


@pytest.mark.full
def test_lines_come_and_go_without_a_trace():
    board = Switchboard(find_here)
    counts = []

    for _ in range(6):
        own = open_line(board)
        is_open, sent, _ = board.put_through(own.name, make_answer(LARGE))
        own.receive(sent, 20)
        board._drop(own.name)
        del own
        until = time.monotonic() + 60
        # Ends are put away by the thread of all lines.
        while counts and count_own() > counts[0] and time.monotonic() < until:
            time.sleep(0.01)
        counts.append(count_own())

    assert counts[-1] <= counts[0]
    assert is_open


def test_a_server_has_so_many_lines_and_drops_those_that_nobody_uses(monkeypatch):
    monkeypatch.setattr(switchboard, "_MOST", 2)
    board = Switchboard(find_here)
    kept = [open_line(board) for _ in range(2)]
    for own in kept:
        assert board.put_through(own.name, make_answer(4))[0]

    assert board.offer() is None
    monkeypatch.setattr(switchboard, "_LEAST_IDLE", 0.0)
    monkeypatch.setattr(client_connections, "MEETING", 0.2)
    time.sleep(0.01)
    assert board.offer() is not None
    assert not board.put_through(kept[0].name, make_answer(4))[0]
    board.close()


def test_an_answer_that_was_taken_is_held_no_longer(monkeypatch):
    board = Switchboard(find_here)
    own, other = open_line(board), open_line(board)
    own.receive(board.put_through(own.name, make_answer(LARGE))[1], 20)
    board.put_through(other.name, make_answer(LARGE))
    assert board._lines[own.name]._held is not None

    board._due = dict.fromkeys(board._due, 0.0)
    board._sweep()

    assert board._lines[own.name]._held is None
    # Its client has not come for it.
    assert list(board._lines) == [own.name]


def test_nobody_listens_but_at_the_address():
    before = {(process, port) for process, _, port in list_listened()}
    board = Switchboard(find_here)
    own = open_line(board)

    heard = [(address, port) for process, address, port in list_listened() if (process, port) not in before]

    assert board.put_through(own.name, make_answer(4))[0]
    assert {address.removeprefix("::ffff:") for address, _ in heard} <= {HERE}
    assert board._store.port in {port for _, port in heard}


def test_no_line_is_offered_where_there_is_no_address():
    assert Switchboard(None).offer() is None


def test_a_client_that_ends_leaves_its_server_as_it_was():
    board = Switchboard(find_here)
    own, answer = open_line(board), make_answer(LARGE)
    assert same(own.receive(board.put_through(own.name, answer)[1], 20), answer)
    name = own.name

    del own
    until = time.monotonic() + 60
    while (reply := board.put_through(name, answer))[0] and time.monotonic() < until:
        time.sleep(0.01)

    assert reply[:2] == (False, None)
    assert reply[2] is answer
    assert not board._lines
    assert not board._used


@pytest.mark.parametrize("whose", ["server", "client"])
def test_who_has_no_address_of_its_own_stays_with_the_other_way(monkeypatch, whose):
    # For documents (RFC 5737): no host has it.
    addresses = {"server": HERE, "client": HERE} | {whose: "192.0.2.1"}
    board = Switchboard(lambda: addresses["server"])
    lines = Lines(lambda part: board.offer(), lambda: addresses["client"])

    with monkeypatch.context() as patch:
        patch.setattr(client_connections, "MEETING", 0.2)
        lines.consider(0, make_answer(LARGE)[1])
    board.close()

    assert lines.find(0) is None
    assert not board._used
