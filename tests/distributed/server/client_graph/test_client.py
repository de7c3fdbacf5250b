"""Clients of servers get the batches of one machine; servers may be slow, or be killed and come back."""

import importlib.util
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.distributed.server.part_server import PartServer
from pyg_direct.errors import ArgumentError, PartitionError
from tests.distributed.ranks import COMMON, as_dict, assert_equal, assert_in_turn, write_data
from tests.processes import run_ranks
from tests.runtime.comm.formation.test_gloo_sockets import list_listened

SEEDS = torch.arange(0, 300, 3)
LINKS = torch.stack([torch.arange(60), torch.arange(90, 150)])
CASES = [{}, {"disjoint": True}, {"replace": True, "weight_attr": "weight"}, {"time_attr": "time"},
         {"subgraph_type": "induced"}]  # fmt: skip


def needs_ray(test):
    """Mark a test of servers that are Ray actors."""
    test = pytest.mark.filterwarnings("ignore")(test)
    return pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")(test)


class ServersHere:
    """Servers in this process."""

    def __init__(self, folder, size=2, delay=0.0, device="cpu"):
        self.size, self._delay = size, delay
        self._servers = [PartServer(folder, part, device) for part in range(size)]
        self.num_asked = self.num_waiting = self.most_waiting = 0

    def ask(self, method, questions):
        self.num_asked += bool(questions) and method == "pick"
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        time.sleep(self._delay)
        self.num_waiting -= 1
        return {part: getattr(self._servers[part], method)(*question) for part, question in questions.items()}


@pytest.mark.parametrize("options", CASES, ids=str)
def test_batches_are_those_of_one_machine(folder, data, options, real_device):
    graph = ClientGraph(ServersHere(folder, device=real_device.type), device=real_device)

    got = list(DistNeighborLoader(graph, [4, -1, 2], SEEDS, **options, **COMMON))

    expected = list(NeighborLoader(data, [4, -1, 2], SEEDS, device="cpu", **options, **COMMON))
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        assert_equal(as_dict(batch.to("cpu")), as_dict(other))


@pytest.mark.parametrize("options", CASES, ids=str)
def test_torchs_default_device_is_none_of_a_client(folder, options):
    graph = ClientGraph(ServersHere(folder), device="cpu")
    expected = list(DistNeighborLoader(graph, [4, -1, 2], SEEDS, **options, **COMMON))
    with torch.device("meta"):
        graph = ClientGraph(ServersHere(folder), device="cpu")
        loader = DistNeighborLoader(graph, [4, -1, 2], SEEDS, **options, **COMMON)
        got = [*loader, loader([0, 1])]

    for batch, other in zip(got[:-1], expected, strict=True):
        assert_equal(as_dict(batch), as_dict(other))


@pytest.mark.parametrize("options", [{"neg_sampling": "binary", "strict_negatives": True},
                                     {"exclude_target_edges": "reverse"}], ids=["strict", "excluded"])  # fmt: skip
def test_clients_share_the_batches_of_links(folder, data, options):
    servers = ServersHere(folder)
    graphs = [ClientGraph(servers, device="cpu", client=(number, 2)) for number in range(2)]

    options |= COMMON
    got = [[as_dict(batch) for batch in DistLinkNeighborLoader(graph, [4, 3], LINKS, **options)] for graph in graphs]

    assert_in_turn(got, LinkNeighborLoader(data, [4, 3], LINKS, device="cpu", **options))


def test_links_of_an_undirected_graph_are_no_strict_negatives_turned_round(tmp_path):
    edges = torch.combinations(torch.arange(7)).t()
    data = Data(edge_index=torch.cat([edges[:, :9], edges[:, :9].flip(0)], 1), num_nodes=7)
    partition_graph(tmp_path / "p", data.edge_index, 2, num_nodes=7)
    graph = ClientGraph(ServersHere(tmp_path / "p"), device="cpu")
    options = {"neg_sampling": {"mode": "binary", "amount": 5}, "strict_negatives": True, "batch_size": 4, "seed": 1}

    got = list(DistLinkNeighborLoader(graph, [2], edges[:, 9:17], **options))

    for batch, other in zip(got, LinkNeighborLoader(data, [2], edges[:, 9:17], device="cpu", **options), strict=True):
        assert_equal(as_dict(batch), as_dict(other))
        pairs = batch.n_id[batch.edge_label_index[:, 4:]].sort(0).values.t().tolist()
        assert set(map(tuple, pairs)).isdisjoint(map(tuple, edges[:, :17].t().tolist()))


def test_a_slow_client_asks_for_no_more_than_it_has_room_for(folder):
    servers = ServersHere(folder)
    loader = DistNeighborLoader(ClientGraph(servers, device="cpu"), [2], SEEDS, prefetch=2, batch_size=5)

    batches = iter(loader)
    next(batches)
    until = time.monotonic() + 60
    while servers.num_asked < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)

    # The one that is used, and two ahead.
    assert servers.num_asked == 3
    batches.close()


def test_a_slow_server_slows_the_client_only(folder):
    servers = ServersHere(folder, delay=0.05)
    loader = DistNeighborLoader(ClientGraph(servers, device="cpu"), [2], SEEDS, prefetch=2, batch_size=10)
    before, ahead = threading.active_count(), []

    for number, _ in enumerate(loader, 1):
        ahead.append(servers.num_asked - number)

    assert len(ahead) == 10
    # However long it takes, one question waits for it, for one of the batches that there is room for.
    assert servers.most_waiting == 1
    assert 0 <= min(ahead) <= max(ahead) <= 2
    assert threading.active_count() <= before + 1


def test_a_client_that_closes_in_an_epoch_says_so(folder):
    graph = ClientGraph(ServersHere(folder), device="cpu")
    batches = iter(DistNeighborLoader(graph, [2], SEEDS, batch_size=5))
    next(batches)

    graph.close()

    with pytest.raises(ArgumentError, match="the graph must be open until the last batch of an epoch, got a closed"):
        next(batches)


def test_a_client_says_what_it_has(folder):
    graph = ClientGraph(ServersHere(folder), device="cpu")

    text = str(DistNeighborLoader(graph, [2], SEEDS).report())

    assert graph.num_bytes == 0
    assert "topology: the rows of a part, of 300 nodes in all" in text
    assert "x: rows of torch.float32 (5,) on servers" in text


def test_a_type_without_times_is_named(folder):
    with pytest.raises(ArgumentError, match=r"kind must be a node type with times, got 'papers' of \['nodes'\]"):
        ClientGraph(ServersHere(folder), device="cpu").times_of("papers", torch.arange(3))


def test_a_graph_that_is_closed_says_so(folder):
    graph = ClientGraph(ServersHere(folder), device="cpu")
    loader = DistNeighborLoader(graph, [2], SEEDS)

    graph.close()

    for use in (lambda: next(iter(loader)), lambda: loader(torch.arange(2))):
        with pytest.raises(ArgumentError, match="the graph is closed, and so is its way to servers"):
            use()


def test_a_batch_by_positions_leaves_those_made_ahead_as_they_are(folder, data):
    servers = ServersHere(folder, delay=0.01)
    loader = DistSubGraphLoader(ClientGraph(servers, device="cpu"), [2, 2], SEEDS, prefetch=3, **COMMON)

    got = [(as_dict(batch), loader(torch.arange(4)).batch_size) for batch in loader]

    expected = list(NeighborLoader(data, [2, 2], SEEDS, subgraph_type="induced", device="cpu", **COMMON))
    assert len(got) == len(expected)
    for (batch, size), other in zip(got, expected, strict=True):
        assert size == 4
        assert_equal(batch, as_dict(other))
    # A plan makes one batch at a time.
    assert servers.most_waiting == 1


def test_errors_name_the_argument(folder):
    with pytest.raises(ArgumentError, match="servers must be one for each of the 2 parts, got 1"):
        ClientGraph(ServersHere(folder, size=1))
    with pytest.raises(ArgumentError, match="client must be"):
        ClientGraph(ServersHere(folder), client=(2, 2))


def test_servers_of_several_partitions_are_refused(folder, data, tmp_path):
    servers = ServersHere(folder)
    write_data(tmp_path / "other", data, 2, method="range")
    servers._servers[1] = PartServer(tmp_path / "other", 1)

    with pytest.raises(PartitionError, match="parts of one partition, got another for part 1 than for part 0"):
        ClientGraph(servers, device="cpu")


def test_clients_that_share_batches_need_a_seed(folder):
    servers = ServersHere(folder)
    shared, alone = (ClientGraph(servers, device="cpu", client=client) for client in ((1, 2), (0, 1)))

    for make, seeds in ((DistNeighborLoader, SEEDS), (DistLinkNeighborLoader, LINKS)):
        with pytest.raises(ArgumentError, match=r"seed must be given, equal in all 2 clients .*, got None"):
            make(shared, [2], seeds, batch_size=50)
        assert len(list(make(alone, [2], seeds, batch_size=50))) == 2
        # Seeds of its own are nobody else's.
        assert len(list(make(shared, [2], seeds, batch_size=50, ranks="own"))) == 2


def test_clients_without_a_group_cannot_leave_out_what_others_lack(folder):
    graph = ClientGraph(ServersHere(folder), device="cpu", client=(1, 2))

    with pytest.raises(ArgumentError, match=r"uneven must be 'keep' with ranks='own' for clients .*, got 'drop'"):
        DistNeighborLoader(graph, [2], SEEDS, ranks="own", uneven="drop")


def load_in_a_group(rank, folder):
    """Batches of clients that train together: with seeds of their own, and with those of all."""
    graph, seeds = ClientGraph(ServersHere(folder), device="cpu", client=(rank, 2)), SEEDS[: 30 + 50 * rank]
    found = {uneven: len(list(DistNeighborLoader(graph, [2], seeds, batch_size=20, ranks="own", uneven=uneven)))
             for uneven in ("pad", "drop", "keep")}  # fmt: skip
    shared = [len(list(make(graph, [2], given, batch_size=20, seed=1)))
              for make, given in ((DistNeighborLoader, SEEDS), (DistLinkNeighborLoader, LINKS))]  # fmt: skip
    return found, shared


def test_clients_in_a_process_group_have_equally_many_batches(folder):
    (first, shared), (second, others) = run_ranks(load_in_a_group, 2, folder)

    assert first == {"pad": 4, "drop": 2, "keep": 2}
    assert second == {"pad": 4, "drop": 2, "keep": 4}
    assert shared == others


@needs_ray
@pytest.mark.parametrize("call", ["connect", "stop"])
def test_a_program_in_no_cluster_is_told_to_name_that_of_the_servers(call, monkeypatch):
    from pyg_direct.distributed.server import ray_servers as engine

    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    with pytest.raises(ArgumentError, match=r"address must name the Ray cluster .* got None"):
        getattr(engine, call)(*((2, "graph") if call == "connect" else ("graph",)))


def connect_apart(addresses, environment):
    """Which parts' servers answer another program of this host, for each address that it names."""
    os.environ |= environment
    import ray

    from pyg_direct.distributed.server.ray_servers import connect

    found = []
    for address in addresses:
        servers = connect(2, "own", address=address)
        found.append(sorted(servers.ask("books", dict.fromkeys(range(2), ()))))
        ray.shutdown()
    return found


def find_mode():
    """Environment by which another program joins a cluster that this one has started."""
    return {name: os.environ[name] for name in ["RAY_AUTH_MODE"] if name in os.environ}


def run_apart(fn, *args):
    """Return the result of a function in a program that ends with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(fn, *args).result(120)


@pytest.mark.slow
@needs_ray
def test_a_cluster_is_started_here_on_the_loopback_though_another_one_is_noted(folder, tmp_path, monkeypatch):
    import ray

    from pyg_direct.distributed.server.ray_servers import _FOR_HOSTS, serve

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = list_listened()
    # Short: Ray's sockets lie there.
    with tempfile.TemporaryDirectory(dir="/tmp") as noted:
        monkeypatch.setenv("RAY_TMPDIR", noted)
        (Path(noted) / "ray").mkdir()
        # As `ray start` leaves it where its cluster was killed: nobody listens at port 1.
        (Path(noted) / "ray/ray_current_cluster").write_text("127.0.0.1:1")
        try:
            servers = serve(folder, "own", num_cpus=0.5)
            answered = servers.ask("books", dict.fromkeys(range(2), ()))
            listened = {address for _, address, _ in list_listened() - before}
            address = ray.get_runtime_context().gcs_address
            # As `ray start` notes it: other tests may have clusters on this host, too.
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray/ray_current_cluster").write_text(address)
            elsewhere = run_apart(connect_apart, [address, "auto"], find_mode() | {"RAY_TMPDIR": str(tmp_path)})
            servers.close()
        finally:
            ray.shutdown()

    assert sorted(answered) == [0, 1]
    assert elsewhere == [[0, 1], [0, 1]]
    # The same address, as an IPv6 socket says it.
    assert listened
    assert {address.removeprefix("::ffff:") for address in listened} == {"127.0.0.1"}
    assert _FOR_HOSTS not in os.environ


@pytest.mark.slow
@needs_ray
def test_servers_do_not_outlive_the_program_that_starts_ray(folder):
    import ray

    from pyg_direct.distributed.server.ray_servers import serve

    with pytest.raises(ArgumentError, match="detached must be False where this program starts Ray"):
        serve(folder, "kept", num_cpus=0.5, detached=True)

    assert not ray.is_initialized()


# The last tests of the file: it stays until they have ended, and those before start clusters of their own.
@pytest.fixture(scope="module")
def engine():
    """Ray for tests that do not ask how it starts."""
    import ray

    from pyg_direct.distributed.server import ray_servers as engine

    engine._start(None)
    yield engine
    ray.shutdown()


@pytest.mark.slow
@needs_ray
def test_a_server_that_is_killed_comes_back_and_no_batch_is_lost(engine, folder, data):
    import ray

    servers = engine.serve(folder, "tested", num_cpus=0.5)
    graph = ClientGraph(engine.connect(2, "tested"), device="cpu")
    got = []
    for number, batch in enumerate(DistNeighborLoader(graph, [4, 3], SEEDS, **COMMON)):
        got.append(as_dict(batch))
        if number in (1, 3):
            ray.kill(ray.get_actor(f"tested/{number % 2}", namespace="pyg_direct"), no_restart=False)
    servers.close()

    expected = list(NeighborLoader(data, [4, 3], SEEDS, device="cpu", **COMMON))
    assert len(got) == len(expected)
    for batch, other in zip(got, expected, strict=True):
        assert_equal(batch, as_dict(other))


@pytest.mark.slow
@needs_ray
def test_names_that_nobody_has_or_somebody_has_are_refused(engine, folder):
    import ray

    servers = engine.serve(folder, "taken", num_cpus=0.5)
    with pytest.raises(ArgumentError, match=r"name must be that of 2 servers .*, got 'other', of which part 0"):
        engine.connect(2, "other")
    with pytest.raises(ArgumentError, match="name must be one that no servers have yet, got 'taken'"):
        engine.serve(folder, "taken", num_cpus=0.5)
    with pytest.raises(ArgumentError, match=r"name must be that of 3 servers .*, got 'taken', of which part 2"):
        engine.connect(3, "taken")
    answered = engine.connect(2, "taken").ask("books", dict.fromkeys(range(2), ()))
    # Servers that cannot all start leave none: the name of one is free.
    ray.kill(ray.get_actor("taken/0", namespace="pyg_direct"))
    with pytest.raises(ArgumentError, match="name must be one that no servers have yet, got 'taken'"):
        engine.serve(folder, "taken", num_cpus=0.5)
    with pytest.raises(ArgumentError, match="of which part 0 has none"):
        engine.connect(2, "taken")
    num_stopped = engine.stop("taken")
    del servers

    assert sorted(answered) == [0, 1]
    assert num_stopped == 1


def serve_apart(address, folder, environment):
    """Start servers that are to outlive this program."""
    os.environ |= environment
    from pyg_direct.distributed.server.ray_servers import serve

    serve(folder, "kept", num_cpus=0.5, address=address, detached=True)


def use_apart(address, environment):
    """(number of batches that the servers of another program give, number of those that were ended)."""
    os.environ |= environment
    from pyg_direct.distributed.server.ray_servers import connect, stop

    graph = ClientGraph(connect(2, "kept", address=address), device="cpu")
    batches = [as_dict(batch) for batch in DistNeighborLoader(graph, [4, 3], SEEDS, **COMMON)]
    return len(batches), stop("kept")


@pytest.mark.slow
@needs_ray
def test_detached_servers_outlive_their_program_until_they_are_stopped(engine, folder, data):
    import ray

    # A cluster that both programs come to.
    address = ray.get_runtime_context().gcs_address
    run_apart(serve_apart, address, folder, find_mode())
    num_batches, num_stopped = run_apart(use_apart, address, find_mode())
    with pytest.raises(ArgumentError, match="got 'kept'"):
        engine.connect(2, "kept")
    with pytest.raises(ArgumentError, match=r"name must be that of servers .*, got 'kept'"):
        engine.stop("kept")

    assert num_batches == len(list(NeighborLoader(data, [4, 3], SEEDS, device="cpu", **COMMON)))
    assert num_stopped == 2
