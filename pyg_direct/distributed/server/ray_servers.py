"""Servers of parts as Ray actors: Ray places, finds and restarts them, and moves their answers.

Messages are arrays. Between hosts Ray moves them as bytes; a client and a server on one host use shared memory. This
package never unpickles data from the network.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from os import PathLike
from typing import Any

from pyg_direct.distributed.partitioning.manifest import Manifest, check_same
from pyg_direct.distributed.server.local_channel import Channels
from pyg_direct.distributed.server.part_server import QUESTIONS, PartServer
from pyg_direct.errors import ArgumentError, PartitionError, RankError, needs_extra
from pyg_direct.object_text import one_line, show_count

with needs_extra("pyg_direct.distributed.server.ray_servers", "ray"):
    import ray

_NAMESPACE = "pyg_direct"
# Versions of Ray with which `_find_internal` was tried.
_KNOWN_RAY = "ray>=2.30,<2.61"
# Ray's switch for clusters of several hosts, on systems on which it is limited to one host by default.
_FOR_HOSTS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# Seconds for a socket of this host to answer.
_LOOK = 2.0
# Seconds within which Ray frees the names of ended servers, and between two checks.
_FREE, _PAUSE = 10.0, 0.02


class RayServers:
    """Servers that are Ray actors.

    Args:
        name: Name given to `serve`.
        size: Number of servers.
        timeout: Seconds to wait for an answer, including a restart of the server.

    Raises:
        ArgumentError: no servers have this name, or fewer than `size`.
    """

    def __init__(self, name: str, size: int, timeout: float = 300) -> None:
        self.size, self._timeout, self._name = size, timeout, name
        self._actors = [_find_server(name, part, size) for part in range(size)]
        # Keeps servers that this program started alive as long as this object.
        self._started: list[Any] = []
        self._channels = Channels(self._meet, timeout)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self._name)
        yield show_count(self.size, "server")

    def ask(self, method: str, questions: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Send questions to the servers of these parts; return their answers. Arrays are valid until this thread's next
        call.

        Raises:
            RankError: a server is gone for good, takes too long, or cannot open its part: a file is missing or damaged.
        """
        told = self._channels.tell(method, questions) if method in QUESTIONS else []
        far = [part for part in questions if part not in told]
        waiting = {part: self._call(part, method, questions[part]) for part in far}
        found = {}
        for part in told:
            has_answer, found[part] = self._channels.hear(part)
            if not has_answer:
                waiting[part] = self._call(part, method, questions[part])
        for part, answer in waiting.items():
            found[part] = self._wait(part, method, answer)
        return found

    def _call(self, part: int, method: str, question: tuple[Any, ...]) -> Any:
        return getattr(self._actors[part], method).remote(*question)

    def _wait(self, part: int, method: str, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=self._timeout)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise RankError(f"the server of part {part} did not answer {method!r}: {error}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PartitionError):
                raise RankError(f"the server of part {part} failed: PartitionError: {error.cause}") from error
            raise

    def _meet(self, part: int, host: str, path: str) -> bool:
        return bool(self._wait(part, "meet", self._call(part, "meet", (host, path))))

    def close(self) -> None:
        """Stop the servers."""
        _end(self._actors, {f"{self._name}/{part}" for part in range(self.size)})


def serve(folder: str | PathLike[str], name: str = "graph", *, num_cpus: float = 1, num_gpus: float = 0,
          address: str | None = None, check: str | None = "size", timeout: float = 300,
          detached: bool = False) -> RayServers:  # fmt: skip
    """Start a server for each part of a partition; `connect` finds them from other programs.

    `RayServers.close` or `stop`, called by any program, ends the servers. Otherwise they end with the program that
    started them or, with `detached`, with the cluster.

    Args:
        folder: The partition, found under this name by every server.
        name: Name by which other programs find the servers.
        num_cpus, num_gpus: Resources that Ray reserves for each server; with a GPU the part lies in its memory.
        address: Address of a Ray cluster, `HOST:PORT`. `auto` is the cluster of `RAY_ADDRESS`, otherwise the cluster
            that `ray start` started on this host. None is the cluster that this program has joined, otherwise the
            cluster of `RAY_ADDRESS`. Without either, a cluster is started for this host only, on the loopback
            interface. For other hosts, start one with `ray start --head` and pass its address. Newer versions of Ray
            protect a cluster that is started here with a token; other programs of the user can join if they set
            `RAY_AUTH_MODE=token`.
        check, timeout: See `GraphPart`, `RayServers`.
        detached: True if the servers outlive this program, as detached actors of Ray. The cluster must outlive it too,
            for example one started by `ray start --head`.

    Raises:
        ArgumentError: servers of this name exist, or Ray ends with this program, which `detached` servers should
            outlive.
        PartitionError: the partition is missing, of another version, or differs between hosts.
        RankError: a server cannot open its part: a file is missing or damaged on its host.
    """
    size = Manifest.read(folder).num_parts
    was_in = ray.is_initialized()
    _start(address)
    if detached and _ends_with_this():
        if not was_in:
            ray.shutdown()
        raise ArgumentError("detached must be False where this program starts Ray, which then ends with it, got True: "
                            "start a cluster with `ray start --head` and give its address")  # fmt: skip
    kept: list[Any] = []
    lifetime = "detached" if detached else None
    try:
        for part in range(size):
            options = ray.remote(PartServer).options(
                name=f"{name}/{part}", namespace=_NAMESPACE, num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1,
                max_task_retries=-1, scheduling_strategy="SPREAD", lifetime=lifetime)  # fmt: skip
            threads = max(1, int(num_cpus))
            kept.append(options.remote(str(folder), part, "cuda" if num_gpus else "cpu", check, threads))
        servers = RayServers(name, size, timeout)
        servers._started = kept
        numbers = servers.ask("identify", dict.fromkeys(range(size), ()))
        check_same([numbers[part] for part in range(size)], "part")
    except BaseException as error:
        # Detached servers would stay.
        _end(kept, {f"{name}/{part}" for part in range(len(kept))})
        if isinstance(error, ValueError) and len(kept) < size:
            raise ArgumentError(f"name must be one that no servers have yet, got {name!r}: {error}") from error
        raise
    return servers


def connect(num_parts: int, name: str = "graph", *, address: str | None = None, timeout: float = 300) -> RayServers:
    """Find the servers that another program started with `serve`.

    Args:
        num_parts: Parts of the graph, each with a server.
        name: Name given to `serve`.
        address: Address of the servers' Ray cluster, `HOST:PORT` or `auto`, as in `serve`. None is the cluster that
            this program has joined, otherwise the cluster of `RAY_ADDRESS`.
        timeout: Seconds to wait for an answer.

    Raises:
        ArgumentError: no servers have this name, or they have fewer parts; or no cluster is named, and this program has
            joined none.
    """
    _join(address)
    return RayServers(name, num_parts, timeout)


def stop(name: str = "graph", *, address: str | None = None) -> int:
    """Stop all servers of a name, started by any program; return their number.

    Args:
        name: Name given to `serve`.
        address: See `connect`.

    Raises:
        ArgumentError: there are none, or no cluster is named and this program has joined none.
    """
    _join(address)
    own = {actor for actor in _list_servers() if actor.rpartition("/")[0] == name}
    if not own:
        raise ArgumentError(f"name must be that of servers which serve() has started in this Ray cluster, got {name!r}")
    actors = []
    for actor in own:
        # Another program may be stopping them too.
        with suppress(ValueError):
            actors.append(ray.get_actor(actor, namespace=_NAMESPACE))
    _end(actors, own)
    return len(own)


def _end(actors: Sequence[Any], names: set[str]) -> None:
    """Stop servers, and wait until Ray frees their names, which happens later."""
    for actor in actors:
        ray.kill(actor)
    until = time.monotonic() + _FREE
    while names & _list_servers() and time.monotonic() < until:
        time.sleep(_PAUSE)


def _list_servers() -> set[str]:
    """List the names of servers, each with its part, of this cluster."""
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == _NAMESPACE}  # fmt: skip


def _find_server(name: str, part: int, size: int) -> Any:
    try:
        return ray.get_actor(f"{name}/{part}", namespace=_NAMESPACE)
    except ValueError as error:
        raise ArgumentError(f"name must be that of {size} servers which serve() has started in this Ray cluster, got "
                            f"{name!r}, of which part {part} has none") from error  # fmt: skip


def _is_named(address: str | None) -> bool:
    """Check if the caller or the environment names a cluster."""
    return address is not None or bool(os.environ.get("RAY_ADDRESS"))


def _join(address: str | None) -> None:
    """Join the cluster of the servers."""
    if not ray.is_initialized() and not _is_named(address):
        raise ArgumentError("address must name the Ray cluster of the servers where this program is in none, HOST:PORT "
                            "or auto, or RAY_ADDRESS must, got None")  # fmt: skip
    _start(address)


def _start(address: str | None) -> None:
    """Join a cluster of Ray, or start one that listens on the loopback interface."""
    if ray.is_initialized():
        return
    if not _is_named(address):
        # With None Ray joins any cluster that `ray start` has recorded on this host, and fails if that one is gone.
        address = "local"
    with _on_loopback() if _is_here(address) else nullcontext():
        ray.init(address=address, namespace=_NAMESPACE, include_dashboard=False, log_to_driver=False)


def _find_internal(module: str, name: str) -> Any:
    """Find an object without a public name in one of Ray's own modules.

    Raises:
        ImportError: the installed version of Ray lacks it.
    """
    try:
        return getattr(importlib.import_module(f"ray._private.{module}"), name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ImportError(f"starting or finding Ray on this host needs ray._private.{module}.{name}, which ray "
                          f'{ray.__version__} lacks: pip install "{_KNOWN_RAY}", or call ray.init before and leave '
                          "detached False") from error  # fmt: skip


def _ends_with_this() -> bool:
    """Check if this program started Ray, which then ends with it."""
    node = _find_internal("worker", "_global_node")
    return node is not None and bool(node.is_head())


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Limit a Ray cluster that is started or joined inside to this host, as on macOS and Windows, unless `_FOR_HOSTS`
    is set.

    Ray itself takes the argument 127.0.0.1 for any address of the host.
    """
    if _FOR_HOSTS in os.environ:
        yield
        return
    before = _find_internal("ray_constants", "ENABLE_RAY_CLUSTER")
    constants: Any = importlib.import_module("ray._private.ray_constants")
    # For Ray's own processes, and for this process, which has read it already.
    os.environ[_FOR_HOSTS], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[_FOR_HOSTS]
        constants.ENABLE_RAY_CLUSTER = before


def _is_here(address: str | None) -> bool:
    """Check if Ray is to be started on this host, or is reachable only from this host."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address is None or address == "local":
        return True
    if address == "auto":
        with _on_loopback():
            address = _find_internal("services", "canonicalize_bootstrap_address")(address)
    host, _, port = str(address).rpartition(":")
    if host not in _LOOPBACK:
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), _LOOK).close()
    except OSError:
        return True
    return False
