"""Large answers over pairs of Gloo: as they were sent, and heard in the other way where an end is gone or silent."""

import os
import subprocess
import sys
import time
from multiprocessing import get_context

import numpy as np
import pytest

from pyg_direct.distributed.server import client_connections
from pyg_direct.distributed.server.client_connections import CLIENT, LARGE, Line, Lines, Sent, Switchboard, can_open
from tests.distributed.hosts import ADDRESSES, Hosts, can_make_hosts, enter_host
from tests.distributed.lines import HERE, find_here, make_answer, open_line, same
from tests.processes import start_method

pytestmark = pytest.mark.skipif(not can_open(), reason="needs a torch with Gloo")
# Seconds that no test has: who waits them out hears nothing.
LONG = 3600.0


def serve_apart(pipe, host=None, address=HERE):
    """A switchboard in a process of its own, told what to do over a pipe as Ray would."""
    if host is not None:
        enter_host(host)
    board = Switchboard(lambda: address)
    while (told := pipe.recv()) is not None:
        method, *args = told
        if method == "answer":
            name, size, number = args
            pipe.send(board.put_through(name, make_answer(size, number)))
        else:
            pipe.send(board.offer())
    board.close()


@pytest.fixture
def apart():
    """(pipe to the server of another process, that process)."""
    context = get_context(start_method())
    mine, theirs = context.Pipe()
    process = context.Process(target=serve_apart, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield mine, process
    if process.is_alive():
        mine.send(None)
        process.join(20)
    process.kill()


def ask(pipe, *told):
    pipe.send(told)
    return pipe.recv()


@pytest.mark.full
def test_answers_of_another_process_come_as_they_were_sent(apart):
    pipe, _ = apart
    own = Line(ask(pipe, "offer"), CLIENT, HERE)

    for number, size in enumerate((LARGE, 10, LARGE // 4, 1 << 20, 40_000)):
        is_open, sent, answer = ask(pipe, "answer", own.name, size, number)
        found = own.receive(sent, 20) if sent is not None else answer

        assert is_open
        assert (sent is not None) == (size * 4 >= LARGE)
        assert same(found, make_answer(size, number))


@pytest.mark.full
def test_a_server_that_ends_is_heard_at_once(apart, monkeypatch):
    # Nobody is given up for being silent.
    monkeypatch.setattr(client_connections, "_SILENCE", LONG)
    pipe, process = apart
    lines = Lines(lambda part: ask(pipe, "offer"), find_here)
    lines.consider(3, make_answer(LARGE)[1])
    name = lines.find(3)
    assert name is not None
    is_open, sent, _ = ask(pipe, "answer", name, LARGE, 1)

    process.kill()
    process.join()
    # What it had not sent by then does not come.
    found = lines.hear(3, (is_open, Sent(sent.number + 1, *sent[1:]), None), LONG)

    assert found == (False, None)
    assert lines.find(3) is None


def test_who_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(client_connections, "_SILENCE", 0.2)
    board = Switchboard(find_here)
    lines = Lines(lambda part: board.offer(), find_here)
    lines.consider(0, make_answer(LARGE)[1])
    is_open, sent, _ = board.put_through(lines.find(0), make_answer(LARGE))
    begin = time.monotonic()

    # Bytes with this number are never sent.
    found = lines.hear(0, (is_open, Sent(sent.number + 1, *sent[1:]), None), LONG)

    assert found == (False, None)
    assert time.monotonic() - begin >= 0.2
    monkeypatch.setattr(client_connections, "_SILENCE", LONG)
    # The next answer is worth a new one.
    lines.consider(0, make_answer(LARGE)[1])
    name = lines.find(0)
    has_answer, answer = lines.hear(0, board.put_through(name, make_answer(LARGE, 5)), LONG)
    assert has_answer
    assert same(answer, make_answer(LARGE, 5))


def test_an_answer_that_nobody_heard_is_not_that_to_the_next_question():
    board = Switchboard(find_here)
    lines = Lines(lambda part: board.offer(), find_here)
    lines.consider(0, make_answer(LARGE)[1])
    board.put_through(lines.find(0), make_answer(LARGE, 1))

    # Its client was interrupted, and its server asked again by Ray.
    assert lines.find(0) is None
    lines.consider(0, make_answer(LARGE)[1])
    name = lines.find(0)
    board.put_through(name, make_answer(LARGE, 2))
    reply = board.put_through(name, make_answer(LARGE, 3))
    has_answer, answer = lines.hear(0, reply, 300)

    assert reply[:2] == (False, None)
    assert has_answer
    assert same(answer, make_answer(LARGE, 3))
    assert lines.find(0) is None


def test_where_the_two_do_not_meet_no_line_is_tried_for_a_while(monkeypatch):
    monkeypatch.setattr(client_connections, "MEETING", 0.3)
    board, offers = Switchboard(find_here), []

    def meet(part):
        # A name that the server knows nothing of.
        offers.append(board.offer()._replace(name="other"))
        return offers[-1]

    lines = Lines(meet, find_here)
    for _ in range(3):
        lines.consider(0, make_answer(LARGE)[1])
        assert lines.find(0) is None
    board.close()

    assert len(offers) == 1
    assert not board._used
    assert not board._opening


def test_answers_of_several_arrays_come_as_they_were_sent():
    board = Switchboard(find_here)
    own, table = open_line(board), np.arange(60_000).reshape(200, 300)
    table.flags.writeable = False
    sent = {"a": table.T, "b": [np.ones(3, bool), np.zeros((0, 2))], "c": (table[::2, ::3], None)}

    _, told, _ = board.put_through(own.name, sent)
    found = own.receive(told, 20)

    assert same(found["a"], table.T)
    assert same(found["b"][0], np.ones(3, bool))
    assert found["b"][1].shape == (0, 2)
    assert same(found["c"][0], table[::2, ::3])
    # It lies in their place.
    _, told, _ = board.put_through(own.name, table)
    assert same(own.receive(told, 20), table)


def ask_apart(pipe, host, address):
    """A client on a host: told what its server said, it says what it heard and after how many seconds."""
    enter_host(host)
    lines = Lines(lambda part: offer, lambda: address)
    while (told := pipe.recv()) is not None:
        method, *args = told
        begin, found = time.monotonic(), None
        if method == "consider":
            (offer,) = args
            lines.consider(0, make_answer(LARGE)[1])
        elif method == "find":
            found = lines.find(0)
        else:
            reply, client_connections._SILENCE = args
            found = lines.hear(0, reply, LONG)
        pipe.send((found, time.monotonic() - begin))


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs network and time namespaces")
def test_a_line_that_is_cut_is_given_up_and_the_next_one_carries():
    context, size = get_context(start_method()), 1 << 20
    with Hosts() as hosts:
        pipes, processes = [], []
        for work, name, address in zip((ask_apart, serve_apart), hosts.names, ADDRESSES, strict=True):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, name, address), daemon=True))
            processes[-1].start()
            pipes.append(mine)
        client, server = pipes

        def hear(number, silence=LONG):
            name = ask(client, "find")[0]
            reply = ask(server, "answer", name, size, number)
            return ask(client, "hear", reply, silence)

        ask(client, "consider", ask(server, "offer"))
        before = hear(1)
        # What is sent over it stays in the server's hands.
        hosts.cut()
        during = hear(2, 1.0)
        name = ask(client, "find")[0]
        hosts.heal()
        ask(client, "consider", ask(server, "offer"))
        after = hear(3)
        hosts.cut()
        reply = ask(server, "answer", ask(client, "find")[0], size, 4)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()

    for (has_answer, answer), number in ((before[0], 1), (after[0], 3)):
        assert has_answer
        assert same(answer, make_answer(size, number))
    # As long as so many bytes might take.
    assert during[0] == (False, None)
    assert during[1] > 1
    assert name is None
    # Neither end keeps its program from ending, whatever is on the way.
    assert reply[1] is not None
    assert [process.exitcode for process in processes] == [0, 0]


FORKS = """
import os, sys, threading
from pyg_direct.distributed.server.client_connections import Switchboard
from tests.distributed.lines import find_here, make_answer, open_line, same

board, opened, done = Switchboard(find_here), threading.Event(), threading.Event()
own = threading.local()

def use():
    own.line = open_line(board)
    for number in range(2):
        _, sent, _ = board.put_through(own.line.name, make_answer(1 << 16, number))
        assert same(own.line.receive(sent, 20), make_answer(1 << 16, number))
        opened.set()
        done.wait()
    print("used again")

thread = threading.Thread(target=use)
thread.start()
opened.wait()
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0) == (child, 0)
print("forked", flush=True)
done.set()
thread.join()
board.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.full
def test_a_process_is_forked_while_a_thread_has_a_line():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)

    assert done.stdout.split("\n")[:2] == ["forked", "used again"], done.stderr[-2000:]
