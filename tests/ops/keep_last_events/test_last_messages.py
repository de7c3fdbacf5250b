"""The log of messages equals the reference on every device, also after rows were dropped."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.ops import keep_last_events
from pyg_direct.ops.keep_last_events import MessageLog
from tests.reference.last_messages import LastMessages


def ids(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def insert(log, expected, src, dst, t, device):
    # The message of an event is its number.
    numbers = torch.arange(expected.count, expected.count + len(src), dtype=torch.float64, device=device)
    log.insert(ids(src, device), ids(dst, device), ids(t, device), numbers.view(-1, 1))
    expected.insert(src, dst, t)


def numbers_of(log, rows):
    messages = log.events.msg[:, 0].long()
    return [int(messages[row]) if row >= 0 else -1 for row in rows.tolist()]


def nodes_of(numbers, role, expected):
    known = {event[3]: event[role] for rows in expected.events for events in rows for event in events}
    return [known[number] for number in numbers]


@given(data=st.data(), num_nodes=st.integers(1, 6), capacity=st.sampled_from([1, 8]))
def test_matches_reference(device, data, num_nodes, capacity):
    node = st.integers(0, num_nodes - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keep_last_events, "_LEAST_ROWS", capacity)
        log, expected = MessageLog(num_nodes, 1, torch.float64, device), LastMessages(num_nodes)

    for _ in range(data.draw(st.integers(1, 4))):
        events = data.draw(st.lists(st.tuples(node, node, st.integers(-3, 3)), min_size=1, max_size=7))
        insert(log, expected, *map(list, zip(*events, strict=True)), device)
        n_id = data.draw(st.lists(node, max_size=5, unique=True))
        last_update = data.draw(st.lists(st.integers(-3, 3), min_size=num_nodes, max_size=num_nodes))
        stand_in = data.draw(st.integers(-1, 6))

        chosen = log.choose(ids(n_id, device), ids(last_update, device), stand_in)
        listed = [numbers_of(log, log.list_events(role, ids(n_id, device))) for role in (log.as_src, log.as_dst)]

        # The events of a node are in any order on a CPU.
        for role in range(2):
            assert nodes_of(listed[role], role, expected) == nodes_of(expected.list_events(role, n_id), role, expected)
            assert sorted(listed[role]) == sorted(expected.list_events(role, n_id))
        known = {event[3]: event for rows in expected.events for events in rows for event in events}
        both = [(role, known[number]) for role in range(2) for number in listed[role]]
        got = zip(numbers_of(log, chosen.rows), *chosen.nodes[1:].tolist(), chosen.elapsed.tolist(), chosen.t.tolist(),
                  strict=True)  # fmt: skip
        assert list(got) == expected.choose(n_id, last_update, both[stand_in] if 0 <= stand_in < len(both) else None)
        assert chosen.nodes[0].tolist() == n_id


def test_memory_follows_the_events_that_are_needed(device):
    log, expected = MessageLog(4, 1, torch.float64, device), LastMessages(4)

    for batch in range(30):
        insert(log, expected, [batch % 4] * 100, [(batch + 1) % 4] * 100, [batch] * 100, device)

    # At most 800 events of the last batches are needed.
    assert log.events.t.numel() <= 2 * 900
    assert numbers_of(log, log.choose(ids([0, 1, 2, 3], device), ids([0] * 4, device)).rows) == [
        event[0] for event in expected.choose([0, 1, 2, 3], [0] * 4)
    ]


def test_after_clear_no_node_has_events(device):
    log, expected = MessageLog(3, 1, torch.float64, device), LastMessages(3)
    insert(log, expected, [0, 1], [1, 2], [5, 6], device)

    log.clear()

    chosen = log.choose(ids([0, 1, 2], device), ids([1, 2, 3], device), 2)
    assert chosen.rows.tolist() == [-1, -1, -1]
    assert chosen.t.tolist() == [0, 0, 0]


def test_a_gpu_leaves_an_id_outside_the_graph_in_errors(device):
    log = MessageLog(3, 1, torch.float64, device)

    checked = log.check(ids([2, 7], device))

    if checked.is_cuda:
        assert checked.tolist() == [2, 0]
        assert log.errors.tolist() == [7]
    else:
        assert log.errors.tolist() in ([0], [7])
