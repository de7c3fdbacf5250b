"""Two processes of a host talk over memory that both see; where one goes away, the other hears it."""

import importlib.util
import socket
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct import NeighborLoader
from pyg_direct.distributed.dist_loader import DistNeighborLoader
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.distributed.server import local_channel as channel_module
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.distributed.server.local_channel import Channel, Channels, call_over, decode, go_over
from pyg_direct.distributed.server.part_server import QUESTIONS, PartServer
from pyg_direct.errors import RankError
from tests.distributed.ranks import COMMON, as_dict, assert_alone, assert_equal
from tests.hetero_data import make_hetero

SEEDS = torch.arange(0, 300, 3)


def make_pair():
    return [Channel(end) for end in socket.socketpair(socket.AF_UNIX)]


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return type(a) is type(b) and a == b


arrays = st.tuples(
    st.sampled_from(["u1", "i4", "i8", "f4", "?"]), st.lists(st.integers(0, 9), min_size=1, max_size=3)
).map(lambda about: np.arange(np.prod(about[1])).astype(about[0]).reshape(about[1]))
keys = st.text(max_size=5) | st.tuples(st.text(max_size=5), st.integers(0, 9))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text() | arrays,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(values, min_size=1, max_size=4))
def test_values_come_as_they_were_sent(sent):
    one, other = make_pair()

    for value in sent:
        one.send(value)
        assert same(value, other.receive(5))


def test_memory_grows_and_is_used_again():
    one, other = make_pair()
    found = []

    for size in (1000, 5, 100_000, 99_000):
        one.send(np.full(size, size))
        found.append(other.receive(5))
        assert found[-1].tolist() == [size] * size

    # Views of what was outgrown stay what they were read as, until the next message of their size.
    assert found[1][:5].tolist() == [5] * 5
    assert np.shares_memory(found[0], found[1])
    assert np.shares_memory(found[2], found[3])
    assert not np.shares_memory(found[1], found[2])


def test_arrays_that_are_not_contiguous_are_sent():
    one, other = make_pair()
    table = np.arange(60).reshape(6, 10)

    one.send([table[::2, ::3], table.T])

    assert same(other.receive(5), [table[::2, ::3].copy(), table.T.copy()])


@pytest.mark.parametrize(
    "words", [b'["array", "|O", [1]]', b'["array", "<i8", [1000]]', b'["array", "<i8", [-1]]', b"{"]
)
def test_words_that_lie_read_nothing(words):
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    mine.sendall(len(words).to_bytes(8, "little") + bytes(8) + words)

    with pytest.raises((TypeError, ValueError)):
        Channel(theirs).receive(5)
    mine.close()


@pytest.mark.parametrize("kind", ["|O", "<U2", "|V8", "<M8[s]"])
def test_objects_are_neither_read_nor_sent(kind):
    with pytest.raises(ValueError, match="arrays of a message must hold numbers, got "):
        decode(["array", kind, [1]], np.zeros(64, np.uint8))
    with pytest.raises(ValueError, match="arrays of a message must hold numbers, got "):
        make_pair()[0].send(np.zeros(1, kind))


def test_an_end_that_is_gone_is_heard():
    one, other = make_pair()
    one.send(3)
    one.close()

    assert other.receive(5) == 3
    with pytest.raises(OSError, match="gone"):
        other.receive(5)
    with pytest.raises(BrokenPipeError):
        other.send(np.zeros(9))


def test_who_does_not_answer_is_not_waited_for():
    one, other = make_pair()

    with pytest.raises(TimeoutError):
        one.receive(0.05)

    other.close()


def test_only_processes_of_the_host_come():
    said = []

    def ask(host, path):
        said.append((host, path))
        return False

    assert call_over(ask) is None
    ((host, path),) = said
    assert go_over("elsewhere", path) is None
    # It is gone with the call.
    assert go_over(host, path) is None


class Servers:
    """Servers in this process, over channels; a call of one is what Ray would do."""

    def __init__(self, folder, size=2, *, breaks=0, sees_hosts=True):
        self.size, self._servers = size, [PartServer(folder, part) for part in range(size)]
        self._channels, self._breaks = Channels(self._meet, 300), breaks
        self._sees_hosts, self.num_over, self.num_called, self.num_met = sees_hosts, 0, 0, 0

    def _meet(self, part, host, path):
        self.num_met += 1
        return self._servers[part].meet(host if self._sees_hosts else "elsewhere", path)

    def ask(self, method, questions):
        told = self._channels.tell(method, questions) if method in QUESTIONS else []
        found = {}
        for part in told:
            self.num_over += 1
            if self._breaks and self.num_over % self._breaks == 0:
                # The server ends with a question in its hands.
                self._channels._channels[part]._socket.shutdown(socket.SHUT_RDWR)
            has_answer, answer = self._channels.hear(part)
            if has_answer:
                found[part] = answer
        for part in questions.keys() - found.keys():
            self.num_called += 1
            found[part] = getattr(self._servers[part], method)(*questions[part])
        return found


def load(servers, options):
    graph = ClientGraph(servers, device="cpu")
    # Ahead, by a thread of its own.
    return [as_dict(batch) for batch in DistNeighborLoader(graph, [4, -1, 2], SEEDS, prefetch=2, **options, **COMMON)]


@pytest.mark.parametrize("options", [{}, {"time_attr": "time"}, {"subgraph_type": "induced"}], ids=str)
@pytest.mark.parametrize("way", [{}, {"breaks": 7}, {"sees_hosts": False}], ids=str)
def test_batches_are_those_of_one_machine(folder, data, options, way):
    servers = Servers(folder, **way)

    got = load(servers, options)

    expected = [as_dict(batch) for batch in
                NeighborLoader(data, [4, -1, 2], SEEDS, device="cpu", **options, **COMMON)]  # fmt: skip
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    # What a client learns first is asked for once, by the threads that ask.
    # What is asked while a channel is broken is called: how often depends on the threads.
    least = 2 * servers.num_called if "breaks" in way else 50
    assert (servers.num_over > least) == servers._sees_hosts
    assert (servers.num_called > 5) == (way != {})
    assert (servers.num_met > 4) == ("breaks" in way)


def test_clients_come_and_go(folder, data):
    # Each asks the same servers from threads of its own.
    servers = Servers(folder)
    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, -1, 2], SEEDS, device="cpu", **COMMON)]
    first, second = (ClientGraph(servers, device="cpu") for _ in range(2))
    one, other = (iter(DistNeighborLoader(graph, [4, -1, 2], SEEDS, prefetch=2, **COMMON)) for graph in (first, second))

    for number, batch in enumerate(expected):
        assert_equal(as_dict(next(one)), batch)
        if number < 3:
            assert_equal(as_dict(next(other)), batch)
        elif number == 3:
            other.close()
            second.close()

    # What each learned first: the graph, books, and from each server which partition it has.
    assert servers.num_called == 2 * 4


def test_graphs_with_types(tmp_path):
    data = make_hetero()
    edges = {kind: data[kind].edge_index for kind in data.edge_types}
    kind = data.node_types[0]
    partition_graph(tmp_path / "p", edges, 2, num_nodes={name: data[name].num_nodes for name in data.node_types})
    fanouts = {edge_type: [3, 2] for edge_type in data.edge_types}
    servers = Servers(tmp_path / "p")

    got = list(DistNeighborLoader(ClientGraph(servers, device="cpu"), fanouts, kind, batch_size=40, seed=1))

    expected = list(NeighborLoader(data, fanouts, kind, batch_size=40, seed=1, device="cpu"))
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        for name in data.node_types:
            assert batch[name].n_id.tolist() == other[name].n_id.tolist()
        for edge_type in data.edge_types:
            assert batch[edge_type].edge_index.tolist() == other[edge_type].edge_index.tolist()
            assert batch[edge_type].e_id.tolist() == other[edge_type].e_id.tolist()
    assert servers.num_over >= 4


def test_a_server_that_is_silent_is_named(folder):
    servers = Servers(folder)
    channels = Channels(servers._meet, 0.05)
    servers._servers[1]._turn.acquire()

    (part,) = channels.tell("read", {1: ([(None, [])], [0], np.empty(0, np.int32))})
    with pytest.raises(RankError, match=r"the server of part 1 did not answer in 0.05 seconds"):
        channels.hear(part)

    servers._servers[1]._turn.release()


@pytest.mark.parametrize("error", [RankError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_an_answer_that_nobody_heard_is_not_that_to_the_next_question(folder, monkeypatch, error):
    servers = Servers(folder)
    channels = Channels(servers._meet, 60)
    kind = servers._servers[0]._part.manifest.nodes[0].name
    nodes = [server._part.tables[kind].ids.int().numpy() for server in servers._servers]

    def ask(count):
        questions = {part: ([(kind, ["x"])], [count], own[:count]) for part, own in enumerate(nodes)}
        assert channels.tell("read", questions) == [0, 1]
        return questions

    def fail(*_):
        raise error

    # Part 0 is given up while the answer of part 1 is on its way.
    ask(5)
    monkeypatch.setattr(channels._channels[0], "receive", fail)
    with pytest.raises(error):
        channels.hear(0)

    for part, question in ask(3).items():
        has_answer, answer = channels.hear(part)
        assert has_answer
        assert answer.tolist() == servers._servers[part].read(*question).tolist()


@pytest.mark.parametrize("is_rested", [True, False])
def test_a_server_that_comes_to_this_host_is_met_again_after_a_rest(folder, data, monkeypatch, is_rested):
    monkeypatch.setattr(channel_module, "_REST", 0.2 if is_rested else 3600.0)
    servers = Servers(folder, sees_hosts=False)
    graph, got, begin = ClientGraph(servers, device="cpu"), [], time.monotonic()

    for batch in DistNeighborLoader(graph, [4, -1, 2], SEEDS, prefetch=0, **COMMON):
        got.append(as_dict(batch))
        if len(got) == 2:
            num_met, seconds, servers._sees_hosts = servers.num_met, time.monotonic() - begin, True
            time.sleep(0.3)

    expected = [as_dict(batch) for batch in NeighborLoader(data, [4, -1, 2], SEEDS, device="cpu", **COMMON)]
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, other)
    # While it is elsewhere, once in a rest and no more.
    assert 2 <= num_met <= (2 * (1 + seconds / 0.2) if is_rested else 2)
    assert (servers.num_over > 10) == is_rested
    assert servers.num_met == num_met + (2 if is_rested else 0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.filterwarnings("ignore")
def test_servers_that_ray_starts_anew_on_this_host_answer_over_memory(folder, data, monkeypatch):
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    monkeypatch.setattr(channel_module, "_REST", 0.1)
    got, over, is_apart = [], set(), True

    class Recorded(Channels):
        def hear(self, part):
            has_answer, answer = super().hear(part)
            over.update({(len(got), part)} if has_answer else ())
            return has_answer, answer

    servers = engine.serve(folder, "back", num_cpus=0.5)

    # Part 1 is on another host until it is killed.
    def meet(part, host, path):
        return servers._meet(part, "elsewhere" if part == 1 and is_apart else host, path)

    servers._channels = Recorded(meet, 300)
    try:
        graph = ClientGraph(servers, device="cpu")
        for batch in DistNeighborLoader(graph, [4, 3], SEEDS, prefetch=0, **COMMON):
            got.append(as_dict(batch))
            if len(got) in (2, 4):
                ray.kill(ray.get_actor(f"back/{len(got) // 4}", namespace="pyg_direct"), no_restart=False)
                is_apart = len(got) == 2
                time.sleep(0.2)
    finally:
        servers.close()
        ray.shutdown()

    assert_alone(got, data, [4, 3], SEEDS)
    # Each batch asks both, part 0 over memory always, the other one once it is here.
    assert over == {(number, 0) for number in range(len(got))} | {(number, 1) for number in range(4, len(got))}


def test_no_thread_answers_while_the_program_ends(folder):
    servers = Servers(folder)
    channels = Channels(servers._meet, 60)
    question = {0: ([(None, [])], [0], np.empty(0, np.int32))}
    assert channels.tell("read", question) == [0]
    channels.hear(0)
    server = servers._servers[0]
    (thread,) = server._clients
    assert server._finish.atexit

    # It is in the middle of an answer.
    server._turn.acquire()
    channels.tell("read", question)
    threading.Timer(0.1, server._turn.release).start()
    server._finish()

    assert not thread.is_alive()


def test_a_question_that_fails_is_asked_in_the_other_way(folder):
    servers = Servers(folder)

    with pytest.raises(KeyError):
        servers.ask("read", {0: ([("nothing", ["x"])], [1], np.zeros(1, np.int32))})

    assert (servers.num_over, servers.num_called) == (1, 1)
