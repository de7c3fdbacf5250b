"""Large answers over pairs of Gloo: as they were sent, and heard in the other way where an end is gone or silent."""

import gc
import importlib.util
import threading
import time
from multiprocessing import get_context

import numpy as np
import psutil
import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.distributed import line, switchboard
from pyg_direct.distributed.channel import Channels
from pyg_direct.distributed.client import ClientGraph
from pyg_direct.distributed.line import CLIENT, LARGE, Line, Lines, Sent, can_open
from pyg_direct.distributed.loader import DistNeighborLoader
from pyg_direct.distributed.serving import QUESTIONS, PartServer
from pyg_direct.distributed.switchboard import Switchboard
from tests.distributed.hosts import ADDRESSES, Hosts, can_make_hosts, enter_host
from tests.distributed.ranks import COMMON, as_dict, assert_equal, write_data
from tests.runtime.test_loopback import list_listened

pytestmark = pytest.mark.skipif(not can_open(), reason="needs a torch with Gloo")
HERE = "127.0.0.1"
SEEDS = torch.arange(0, 300, 3)


def find_here():
    return HERE


def make_answer(size, number=0):
    return 7, (np.arange(size, dtype=np.int64) + number).astype(np.float32).reshape(-1, 2)


def same(a, b):
    return a[0] == b[0] and a[1].dtype == b[1].dtype and a[1].shape == b[1].shape and a[1].tobytes() == b[1].tobytes()


def open_line(board):
    return Line(board.offer(), CLIENT, HERE)


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
    context = get_context("spawn")
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


def test_answers_of_another_process_come_as_they_were_sent(apart):
    pipe, _ = apart
    own = Line(ask(pipe, "offer"), CLIENT, HERE)

    for number, size in enumerate((LARGE, 10, LARGE // 4, 1 << 20, 40_000)):
        is_open, sent, answer = ask(pipe, "answer", own.name, size, number)
        found = own.receive(sent, 20) if sent is not None else answer

        assert is_open
        assert (sent is not None) == (size * 4 >= LARGE)
        assert same(found, make_answer(size, number))


def test_a_server_that_ends_is_heard_at_once(apart):
    pipe, process = apart
    lines = Lines(lambda part: ask(pipe, "offer"), find_here)
    lines.consider(3, make_answer(LARGE)[1])
    name = lines.find(3)
    assert name is not None
    is_open, sent, _ = ask(pipe, "answer", name, LARGE, 1)

    process.kill()
    process.join()
    begin = time.monotonic()
    # What it had not sent by then does not come.
    found = lines.hear(3, (is_open, Sent(sent.number + 1, *sent[1:]), None), 300)

    assert found == (False, None)
    assert time.monotonic() - begin < line._SILENCE / 2
    assert lines.find(3) is None


def test_a_client_that_ends_leaves_its_server_as_it_was():
    board = Switchboard(find_here)
    own, answer = open_line(board), make_answer(LARGE)
    assert same(own.receive(board.put_through(own.name, answer)[1], 20), answer)
    name = own.name

    del own
    until = time.monotonic() + 20
    while (reply := board.put_through(name, answer))[0] and time.monotonic() < until:
        time.sleep(0.01)

    assert reply[:2] == (False, None)
    assert reply[2] is answer
    assert not board._lines
    assert not board._used


def test_who_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(line, "_SILENCE", 0.2)
    board = Switchboard(find_here)
    lines = Lines(lambda part: board.offer(), find_here)
    lines.consider(0, make_answer(LARGE)[1])
    is_open, sent, _ = board.put_through(lines.find(0), make_answer(LARGE))
    begin = time.monotonic()

    # Bytes with this number are never sent.
    found = lines.hear(0, (is_open, Sent(sent.number + 1, *sent[1:]), None), 300)

    assert found == (False, None)
    assert 0.2 <= time.monotonic() - begin < 5
    # The next answer is worth a new one.
    lines.consider(0, make_answer(LARGE)[1])
    name = lines.find(0)
    has_answer, answer = lines.hear(0, board.put_through(name, make_answer(LARGE, 5)), 300)
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
    monkeypatch.setattr(line, "MEETING", 0.3)
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


def count_own():
    gc.collect()
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def test_lines_come_and_go_without_a_trace():
    board = Switchboard(find_here)
    counts = []

    for _ in range(6):
        own = open_line(board)
        is_open, sent, _ = board.put_through(own.name, make_answer(LARGE))
        own.receive(sent, 20)
        board._drop(own.name)
        del own
        until = time.monotonic() + 5
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
    monkeypatch.setattr(line, "MEETING", 0.2)
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


def ask_apart(pipe, host, address):
    """A client on a host: told what its server said, it says what it heard and after how many seconds."""
    enter_host(host)
    line._SILENCE = 1.0
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
            found = lines.hear(0, *args, 300)
        pipe.send((found, time.monotonic() - begin))


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs network and time namespaces")
def test_a_line_that_is_cut_is_given_up_and_the_next_one_carries():
    context, size = get_context("spawn"), 1 << 20
    with Hosts() as hosts:
        pipes, processes = [], []
        for work, name, address in zip((ask_apart, serve_apart), hosts.names, ADDRESSES, strict=True):
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, name, address), daemon=True))
            processes[-1].start()
            pipes.append(mine)
        client, server = pipes

        def hear(number):
            name = ask(client, "find")[0]
            reply = ask(server, "answer", name, size, number)
            return ask(client, "hear", reply)

        ask(client, "consider", ask(server, "offer"))
        before = hear(1)
        # What is sent over it stays in the server's hands.
        hosts.cut()
        during = hear(2)
        name = ask(client, "find")[0]
        hosts.heal()
        ask(client, "consider", ask(server, "offer"))
        after = hear(3)
        hosts.cut()
        reply = ask(server, "answer", ask(client, "find")[0], size, 4)
        begin = time.monotonic()
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(60)
        seconds = time.monotonic() - begin

    for (has_answer, answer), number in ((before[0], 1), (after[0], 3)):
        assert has_answer
        assert same(answer, make_answer(size, number))
    # As long as so many bytes might take.
    assert during[0] == (False, None)
    assert 1 < during[1] < 10
    assert name is None
    # Neither end keeps its program from ending, whatever is on the way.
    assert reply[1] is not None
    assert [process.exitcode for process in processes] == [0, 0]
    assert seconds < 10


class FarServers:
    """Servers in this process, as if on other hosts; a call of one is what Ray would do."""

    def __init__(self, folder, breaks):
        self._servers = [PartServer(folder, part, find_address=find_here) for part in range(2)]
        self.size, self._breaks = 2, breaks
        self._lines = Lines(lambda part: self._servers[part].meet_far(), find_here)
        self.num_over = self.num_broken = 0

    def ask(self, method, questions):
        found = {}
        for part, question in questions.items():
            server = self._servers[part]
            name = self._lines.find(part) if method in QUESTIONS else None
            reply = server.answer(name, method, question) if name is not None else None
            has_answer = False
            if reply is not None:
                self.num_over += reply[1] is not None
                if self._breaks and reply[1] is not None and self.num_over % self._breaks == 0:
                    self.num_broken += 1
                    server._switchboard._drop(name)
                    reply = (reply[0], Sent(reply[1].number + 1, *reply[1][1:]), None)
                has_answer, found[part] = self._lines.hear(part, reply, 300)
            if not has_answer:
                found[part] = getattr(server, method)(*question)
            if method in QUESTIONS:
                self._lines.consider(part, found[part])
        return found


@pytest.mark.parametrize("breaks", [0, 5])
@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}], ids=str)
def test_batches_are_those_of_one_machine(folder, data, options, breaks, monkeypatch):
    for room in (line, switchboard):
        monkeypatch.setattr(room, "LARGE", 64)
    servers = FarServers(folder, breaks)
    before = threading.active_count()

    graph = ClientGraph(servers, device="cpu")
    got = [as_dict(batch) for batch in DistNeighborLoader(graph, [4, 3], SEEDS, prefetch=2, **options, **COMMON)]
    graph.close()

    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], SEEDS, device="cpu", **options, **COMMON)]
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    assert servers.num_over > 20
    assert (servers.num_broken > 3) == (breaks > 0)
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.filterwarnings("ignore")
def test_batches_over_lines_are_those_of_one_machine_while_servers_are_killed(data, tmp_path, monkeypatch):
    import ray

    from pyg_direct.distributed import engine

    got, over = [], set()

    class Recorded(Lines):
        def hear(self, part, reply, timeout):
            has_answer, answer = super().hear(part, reply, timeout)
            over.update({(len(got), part)} if has_answer and reply[1] is not None else ())
            return has_answer, answer

    monkeypatch.setattr(engine, "Lines", Recorded)
    data.x = torch.rand(data.num_nodes, 2000)
    write_data(tmp_path / "wide", data, 2)
    servers = engine.serve(tmp_path / "wide", "far", num_cpus=0.5)
    # As if they were on other hosts.
    servers._channels = Channels(lambda *_: False, 300)
    try:
        graph = ClientGraph(servers, device="cpu")
        for batch in DistNeighborLoader(graph, [4, 3], SEEDS, prefetch=0, **COMMON):
            got.append(as_dict(batch))
            if len(got) in (2, 4):
                ray.kill(ray.get_actor(f"far/{len(got) // 2 - 1}", namespace="pyg_direct"), no_restart=False)
    finally:
        servers.close()
        ray.shutdown()

    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, 3], SEEDS, device="cpu", **COMMON)]
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    # All but the first rows of each server, until it is killed and after it is back.
    assert over == {(1, 0), (3, 0), (4, 0), (5, 0), (6, 0), (1, 1), (2, 1), (3, 1), (5, 1), (6, 1)}
