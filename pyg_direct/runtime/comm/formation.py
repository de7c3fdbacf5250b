"""`Formation`: meeting and connection of the processes of a group over Gloo, with an immediate error if one of them
fails.

`Connections` are the sockets of a group, shut down when a peer is gone. `find_loopback` and `stay_on_host` serve
processes that need to reach only each other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pyg_direct.errors import ArgumentError, RankError
from pyg_direct.runtime.comm.heartbeat import Pulse, open_store
from pyg_direct.runtime.comm.host_group import identify_host

# Interface that Gloo and NCCL listen on; without it, the interface of the host's name.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ADDRESS = "127.0.0.1"


def find_loopback() -> str | None:
    """Return the name of the interface with 127.0.0.1; None without one, or if networks cannot be identified."""
    if sys.platform != "linux":
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, parts in found if any(part.address == _ADDRESS for part in parts)), None)


def stay_on_host() -> None:
    """Make Gloo and NCCL of this process and its children listen on the loopback, unless the environment names an
    interface.

    For processes that are started for one host only, before their first group.
    """
    loopback = find_loopback()
    for name in (GLOO, NCCL) if loopback is not None else ():
        assert loopback is not None
        os.environ.setdefault(name, loopback)


def check_interfaces() -> None:
    """Check that the interfaces that Gloo is to listen on are there: otherwise no attempt to join would succeed."""
    names, known = [name for name in os.environ.get(GLOO, "").split(",") if name], psutil.net_if_addrs()
    missing = [name for name in names if name not in known]
    if missing:
        raise ArgumentError(f"{GLOO} must name network interfaces of this host, {', '.join(sorted(known))}, got "
                            f"{', '.join(missing)}")  # fmt: skip


def describe_network() -> str:
    """Describe the network of this process: equal words for processes whose groups can listen on the loopback, and a
    unique word for each other process.

    They cannot if they see different loopbacks, or if `GLOO_SOCKET_IFNAME` names another interface.
    """
    loopback = None if os.environ.get(GLOO) else find_loopback()
    return f"{loopback} {_identify_network()}" if loopback is not None else f"rank {dist.get_rank()}"


@contextmanager
def on_loopback(is_wanted: bool) -> Iterator[None]:
    """Make Gloo groups that are created in the block listen on the loopback.

    Args:
        is_wanted: False leaves the default; True requires that all their processes have the same `describe_network`.
    """
    loopback = find_loopback() if is_wanted else None
    if loopback is None or os.environ.get(GLOO):
        yield
        return
    os.environ[GLOO] = loopback
    try:
        yield
    finally:
        del os.environ[GLOO]


def _identify_network() -> str:
    """Return a word that all processes with the same loopback have in common."""
    space = Path("/proc/self/ns/net")
    return f"{identify_host()} {os.readlink(space) if space.is_symlink() else ''}"


_OPEN_FILES = "/proc/self/fd"


class Connections:
    """Sockets that a process group opened.

    If a host no longer answers, Gloo waits until its timeout, and keeps the process from ending; it has no way to give
    up. If its sockets are shut down, it fails at once.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, int] = {}
        self._before: dict[int, int] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record the sockets that are opened in the block."""
        self._before = _list_sockets()
        try:
            yield
        finally:
            self._note()
            self._before = None

    def _note(self) -> None:
        if (before := self._before) is not None:
            self._sockets |= {fd: inode for fd, inode in _list_sockets().items() if before.get(fd) != inode}

    def give_up(self) -> None:
        """Shut down the sockets that are still open, also while others are being opened."""
        self._note()
        now = _list_sockets()
        for fd, inode in self._sockets.items():
            # The descriptor may have been reused.
            if now.get(fd) == inode:
                with socket.socket(fileno=os.dup(fd)) as own:
                    try:
                        own.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue


def _list_sockets() -> dict[int, int]:
    """Return inodes of this process's connected sockets by file descriptor, on Linux."""
    found = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    own.getpeername()
                found[int(name)] = status.st_ino
        except OSError:
            # Closed meanwhile, or a listening socket.
            continue
    return found


T = TypeVar("T")
# Attempts to join a group whose connections were lost, as shares of the silence: a busy machine drops some. If one rank
# fails at once, the others wait for all of an attempt.
_ATTEMPTS = (0.2, 0.2, 0.2, 0.4)
# Least seconds of an attempt, whatever the silence: connecting takes long on a busy machine.
_LEAST = 10.0
# Seconds between two reads of the words of the others, growing, and between two checks that they are alive.
_FIRST_PAUSE, _LAST_PAUSE, _LOOK = 0.002, 0.25, 0.25
# Seconds that a failing process waits for the store that keeps the group together.
_PATIENCE = 5.0
# Seconds that the thread of a group that is not formed is waited for.
_END = 2.0
_FAILED = "failed"


class _Names:
    """Names of groups; members that form their groups in one order get equal names."""

    def __init__(self) -> None:
        self._find_world: Callable[[], Any] = lambda: None
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def make(self, ranks: Sequence[int]) -> str:
        """Return a name for the next group of these ranks."""
        # Another default group may have processes that made no group before.
        if self._find_world() is not dist.group.WORLD:
            self._find_world, self._numbers = weakref.ref(dist.group.WORLD), Counter()
        members = tuple(ranks)
        self._numbers[members] += 1
        # The store of torchrun's agent outlives the processes that it restarts.
        started = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        return hashlib.sha256(repr((started, members, self._numbers[members])).encode()).hexdigest()[:24]


_NAMES = _Names()


class Formation:
    """Joins the processes of a group; all of them make one for the same ranks, in one order.

    Each process that has joined sends heartbeats, and reports the state of its connections. A process that dies is
    named after its silence, one that fails at once, and one that never joins after the timeout. Lost connections are
    made again.

    Args:
        ranks: Members by rank in the default group, this process among them.
        timeout: Seconds to wait for missing processes, and for all to be joined.
        silence: Seconds without a heartbeat after which a process is gone.

    Attributes:
        pulse: Heartbeats of the members, from `join` on.
    """

    def __init__(self, ranks: Sequence[int], timeout: float, silence: float) -> None:
        self._ranks, self._timeout, self._silence = list(ranks), timeout, silence
        self._rank = self._ranks.index(dist.get_rank())
        self._name = _NAMES.make(ranks)
        self._until = time.monotonic() + timeout
        self._is_given_up = False
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self.pulse: Pulse | None = None

    def join(self, connections: Connections) -> Any:
        """Return a process group of Gloo that has all members."""
        try:
            self.pulse = Pulse(self._name, self._rank, len(self._ranks), self._silence)
            self.pulse.wait_for_beat()
        except (RuntimeError, dist.DistError) as error:
            raise RankError(f"{name_ranks(self._ranks, [0])} is gone: {error}") from error
        try:
            return self.watch(partial(self._join, connections))
        except RankError:
            raise
        except (RuntimeError, dist.DistError) as error:
            # The store fails with the process that keeps it.
            raise RankError(f"{name_ranks(self._ranks, [0])} is gone: {error}") from error

    def open_store(self, name: str) -> Any:
        """Return a store of the members of a joined group, for keys under this name."""
        return PrefixStore(name, self._store)

    def watch(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which waits for the others in its own thread while these are alive."""
        assert self.pulse is not None
        found: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:
                failures.append(error)

        thread = self._thread = threading.Thread(target=run, name="pyg_direct_formation", daemon=True)
        thread.start()
        self.pulse.watch()
        while thread.is_alive():
            thread.join(_LOOK)
            if thread.is_alive() and (missing := self.pulse.gone or self.pulse.find_silent()):
                missing = self.pulse.tell_gone(missing)
                reason = f"no sign of life for {self._silence:g} seconds while the group was formed"
                raise RankError(f"{name_ranks(self._ranks, missing)} is gone: {reason}")
        self.pulse.rest()
        if failures:
            raise failures[0]
        return found[0]

    def abandon(self) -> None:
        """Stop the heartbeat, and wait a moment for unfinished work."""
        self._is_given_up = True
        if self.pulse is not None:
            self.pulse.stop()
        if self._thread is not None:
            self._thread.join(_END)

    def _join(self, connections: Connections) -> Any:
        limit = min(self._timeout, max(self._silence, _LEAST))
        # Not the connection of the heartbeat, which must go on while Gloo waits for words of others.
        store = self._store = _open_board(self._name, limit)
        word = describe_network()
        self._say(f"came/{self._rank}", word)
        words = self._hear("came", "")
        reason = ""
        for attempt, share in enumerate(_ATTEMPTS):
            again, limit = f"again/{attempt}", min(self._timeout, max(share * self._silence, _LEAST))
            try:
                # Only Gloo's connections: this process may hold the store of all.
                with on_loopback(all(other == word for other in words or [])), connections.opened():
                    group = dist.ProcessGroupGloo(PrefixStore(f"gloo/{attempt}", store), self._rank, len(self._ranks),
                                                  timedelta(seconds=limit))  # fmt: skip
            except RuntimeError as error:
                # The first reason: the others lose their connections because of it.
                if not store.check([again]):
                    self._say(again, f"rank {self._ranks[self._rank]}: {error}")
            else:
                self._say(f"formed/{attempt}/{self._rank}", "")
                if self._hear(f"formed/{attempt}", again) is not None:
                    # An exchange may take longer.
                    group._set_default_timeout(timedelta(seconds=self._timeout))
                    return group
                del group
            reason = store.get(again).decode(errors="replace")
            # No member starts again before all have left the attempt that failed.
            self._say(f"left/{attempt}/{self._rank}", "")
            self._hear(f"left/{attempt}", "")
        raise RankError(f"the processes could not be joined in {len(_ATTEMPTS)} attempts, at last {reason}")

    def _say(self, key: str, word: str) -> None:
        self._store.set(key, word)

    def _hear(self, what: str, again: str) -> list[str] | None:
        """Return the word of each member; None if one of them is `again`."""
        keys = [f"{what}/{rank}" for rank in range(len(self._ranks))]
        pause = _FIRST_PAUSE
        while True:
            # Before the words: a late process finds the words of members that have given up.
            if self._store.check([_FAILED]):
                raise RankError(self._store.get(_FAILED).decode(errors="replace"))
            if self._store.check(keys):
                return [self._store.get(key).decode() for key in keys]
            if again and self._store.check([again]):
                return None
            if self._is_given_up:
                raise RankError("the group is not formed any more")
            if time.monotonic() > self._until:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if missing:
                    words = (f"{name_ranks(self._ranks, missing)} did not come within {self._timeout:g} seconds to "
                             "form a group with the others")  # fmt: skip
                    self._say(_FAILED, words)
                    raise RankError(words)
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE)


@contextmanager
def failures_told(group: Any = None) -> Iterator[None]:
    """Send the members that form the group, or wait to form it, the error that the block raises.

    Used before a `Formation`; if the block fails, it takes the place of the formation.

    Args:
        group: The process group of the members; None for all, if there is a default group.
    """
    try:
        yield
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            _tell_failure(dist.get_process_group_ranks(dist.group.WORLD if group is None else group), error)
        raise


def _tell_failure(ranks: Sequence[int], error: Exception) -> None:
    own = dist.get_rank()
    if own not in ranks or len(ranks) == 1:
        return
    name = _NAMES.make(ranks)
    try:
        _open_board(name, _PATIENCE).set(_FAILED, f"rank {own} failed: {type(error).__name__}: {error}")
    except (RuntimeError, dist.DistError):
        # The user should see the original error of this process.
        return


def name_ranks(ranks: Sequence[int], members: Sequence[int]) -> str:
    """Name members of a group by rank in the default group."""
    names = f"rank {', '.join(str(ranks[member]) for member in members)}"
    return names + (", or what keeps the group together," if 0 in members else "")


def _open_board(name: str, timeout: float) -> Any:
    return PrefixStore(f"pyg_direct/{name}/board", open_store(timeout))
