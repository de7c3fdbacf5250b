"""Model of loading in parts on more hosts than are here, from rates measured on one host.

A batch takes the time of its own work and of its exchanges. The work is measured in one process that groups nodes by
owner, packs answers and joins them as several do, though it owns all nodes; a single host needs none of this. Hosts run
in lockstep: a step takes the work of the largest batch, with batch sizes assumed to be normally distributed. An
exchange is a header and a body; if GPUs capture it, it is one all-to-all of NCCL, whose time and rate are measured in
the same run. Each takes a message to every other host, one after the other, and the bytes over one link, without
competition between hosts. Rows of captured batches travel beside the hops of the next batch. So a batch takes the
longer of the two: hops with their work, or rows. Bytes are measured with two processes, and scaled by the share of
nodes on other hosts. This share is (P - 1) / P for a hash. For METIS it is measured with real batches around the nodes
of one part. The model is compared with measurements of several processes on this host, over the link that
`measure_distributed` found. There processes slow each other down: sampling and reading as much as those of processes
that exchange nothing, all else by the share of the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pyg_direct.bench.result_row import Row

HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Exchanges of a group: two for each of three hops, two for rows, each with a header and a body; and one at the start.
_MESSAGES = 2 * (2 * 3 + 2) + 1
# Of a captured batch: two for each of three hops; beside them ids of rows, and rows.
_HOP_MESSAGES, _ROW_MESSAGES = 2 * 3, 2


@dataclass(frozen=True)
class Network:
    """A network: seconds of one message to one host, bytes a second of a host's link."""

    name: str
    message: float
    bandwidth: float


NETWORKS = (Network("25 Gb/s", 4e-6, 3.1e9), Network("100 Gb/s", 2e-6, 12.5e9), Network("400 Gb/s", 2e-6, 50e9))


@dataclass(frozen=True)
class Load:
    """Cost of a batch.

    Attributes:
        own_seconds: Seconds of one process that holds the whole graph and exchanges nothing.
        bytes_if_remote: Bytes sent for it if all its nodes were remote.
        edges: Edges of the batch.
        spread: Standard deviation of the edges over their mean, between batches.
        shared_seconds: Seconds of one process that holds the whole graph and answers its own requests; None: as
            `own_seconds`.
        group: Batches that an exchange makes.
        messages: Messages to each other host for a group.
        beside_messages, beside_bytes: Messages and bytes that travel beside the work of the next batch, as
            `messages` and `bytes_if_remote`.
    """

    own_seconds: float
    bytes_if_remote: float
    edges: float
    spread: float = 0.0
    shared_seconds: float | None = None
    group: float = 1.0
    messages: int = _MESSAGES
    beside_messages: int = 0
    beside_bytes: float = 0.0


def predict_seconds(load: Load, hosts: int, remote: float, message: float, bandwidth: float) -> float:
    """Predict the seconds of a batch on each of `hosts` hosts, with nothing hidden behind training.

    Args:
        load: The batch.
        hosts: Number of hosts P.
        remote: Share of its nodes on other hosts.
        message: Seconds of a message to one host.
        bandwidth: Bytes a second of a link.
    """
    if hosts == 1:
        return load.own_seconds
    # Expected maximum of as many normally distributed sizes.
    largest = 1 + load.spread * math.sqrt(2 * math.log(hosts))
    own = load.own_seconds if load.shared_seconds is None else load.shared_seconds

    def travel(messages: int, num_bytes: float) -> float:
        return messages * (hosts - 1) / load.group * message + remote * num_bytes / bandwidth

    return max(largest * own + travel(load.messages, load.bytes_if_remote),
               travel(load.beside_messages, load.beside_bytes))  # fmt: skip


def find_contention(found: Mapping[int, Mapping[str, Any]], count: int) -> float | None:
    """Return how much slower a process samples and reads beside others that exchange nothing; None if not measured."""
    alone, beside = found[1].get("whole"), found[count].get("whole")
    return count * median(alone) / median(beside) if alone and beside else None


def model_scaling(found: Mapping[int, Mapping[str, Any]], case: str, *, crowding: Callable[[int], float] = lambda _: 1,
                  contention: Callable[[int], float | None] = lambda _: None,
                  cut: Mapping[int, float] | None = None) -> Iterator[Row]:  # fmt: skip
    """Yield rows of the model: compared with measurements, and extended to 1,024 hosts.

    Args:
        found: Results of `measure_distributed` by number of processes, including one process.
        case: Case of the rows.
        crowding: Slowdown of a process here by the number of processes, if there were fewer cores.
        contention: Slowdown of sampling and reading by that number; None as `crowding`.
        cut: Share of a batch's nodes in other parts, by number of parts, with parts by METIS and seeds of the own part.
    """
    measured = sorted(count for count in found if count > 1)
    first = found[measured[0]]
    # With a hash, a share (P - 1) / P of the nodes is remote.
    row_bytes, other_bytes = (first[key] * measured[0] / (measured[0] - 1) for key in ("row_bytes", "other_bytes"))
    own = found[1]["seconds"]
    shared = found[1].get("shared_seconds", own)
    is_captured = "segment_seconds" in first
    load = Load(own, row_bytes + other_bytes, median(found[1]["edges"]) * own, found[1]["spread"], shared,
                first.get("group", 1.0))  # fmt: skip
    if is_captured:
        load = replace(load, bytes_if_remote=other_bytes, group=1.0, messages=_HOP_MESSAGES,
                       beside_messages=_ROW_MESSAGES, beside_bytes=row_bytes)  # fmt: skip
    for count in measured:
        result = found[count]
        slowdown = contention(count)
        slowed = own * (crowding(count) if slowdown is None else slowdown) + (shared - own) * crowding(count)
        # A meeting on the host is a header and a body.
        seconds = result["segment_seconds"] if is_captured else [value / 2 for value in result["empty"]]
        predicted = predict_seconds(replace(load, shared_seconds=slowed), count, (count - 1) / count,
                                    median(seconds) / (count - 1),
                                    median(result["segment_rate" if is_captured else "bandwidth"]))  # fmt: skip
        crowded = f"; {crowding(count):g} processes to a core" if crowding(count) > 1 else ""
        yield Row.of(f"{case}/model/{count}", "predicted over measured time of a batch", "x",
                     [predicted / result["seconds"]],
                     note="with the messages and the link of this host; the work of answering others is taken for that "
                          f"of answering oneself{crowded}")  # fmt: skip
    for network in NETWORKS:
        for hosts in HOSTS:
            seconds = predict_seconds(load, hosts, (hosts - 1) / hosts, network.message, network.bandwidth)
            yield Row.of(f"{case}/model/{network.name}/{hosts}", f"predicted, {network.name}, parts by hash", "G/s",
                         [hosts * load.edges / seconds / 1e9], curve="scale model", at=hosts, at_name="hosts",
                         note=f"{network.message * 1e6:.0f} us a message, one after the other; nothing hidden behind "
                              "training")  # fmt: skip
    network = NETWORKS[1]
    for hosts, remote in (cut or {}).items():
        seconds = predict_seconds(load, hosts, remote, network.message, network.bandwidth)
        yield Row.of(f"{case}/model/METIS/{hosts}", f"predicted, {network.name}, parts by METIS", "G/s",
                     [hosts * load.edges / seconds / 1e9], curve="scale model", at=hosts, at_name="hosts",
                     note=f"{100 * remote:.1f} % of the nodes of a batch are of other parts")  # fmt: skip
    for count in sorted(found):
        rates = [v / 1e9 for v in found[count]["edges"]]
        yield Row.of(f"{case}/model/measured/{count}", "measured on one host", "G/s", rates, curve="scale model",
                     at=count, at_name="hosts")  # fmt: skip
