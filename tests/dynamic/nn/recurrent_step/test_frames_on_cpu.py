"""Recurrent layers of a frame's snapshots on a CPU, as many at once as its cache has room for."""

import pytest
import torch

from pyg_direct.dynamic.nn import mpnn_lstm
from pyg_direct.dynamic.nn.mpnn_lstm import Frame, RunTogether

NODES, WINDOW, SIZE, FEATURES = 20, 3, 4, 2


class Alone:
    """Operator that aggregates nothing."""

    def multiply_window(self, operator, x, weighted=True, first=0, transposed=False):
        return x


def make_parameters(dtype):
    cells = [torch.nn.Linear(FEATURES, SIZE), torch.nn.BatchNorm1d(SIZE), torch.nn.Linear(SIZE, SIZE),
             torch.nn.BatchNorm1d(SIZE), torch.nn.LSTM(2 * SIZE, SIZE), torch.nn.LSTM(SIZE, SIZE)]  # fmt: skip
    return cells, [parameter for cell in cells for parameter in cell.to(dtype).parameters()]


def run_slowly(cells, x):
    """Rows of a snapshot by torch's own layers."""
    conv, norm, conv_2, norm_2, lstm, lstm_2 = cells
    first = norm(conv(x).relu())
    rows, (state, _) = lstm(torch.cat([first, norm_2(conv_2(first).relu())], 1).unsqueeze(0))
    return torch.cat([state[0], lstm_2(rows)[1][0][0], x], 1)


def count_steps(monkeypatch):
    sizes = []
    run = mpnn_lstm.open_lstm

    def listen(rows, *parameters, **places):
        sizes.append(len(rows))
        return run(rows, *parameters, **places)

    monkeypatch.setattr(mpnn_lstm, "open_lstm", listen)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seen", [[2], [0], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize(("room", "at_once"), [(1000, [60]), (45, [40, 20]), (20, [20] * 3), (13, [13] * 4 + [8])])
def test_any_number_of_rows_at_once_gives_rows_and_gradients_of_torch(monkeypatch, room, at_once, seen, dtype):
    torch.manual_seed(0)
    cells, parameters = make_parameters(dtype)
    x = torch.randn(WINDOW, NODES, FEATURES, dtype=dtype)
    grad = torch.randn(NODES, 2 * SIZE + FEATURES, dtype=dtype)
    expected = [run_slowly(cells, part) for part in x]
    expected_grads = torch.autograd.grad([expected[t] for t in seen], parameters, [grad] * len(seen))
    monkeypatch.setattr(mpnn_lstm, "_count_rows", lambda width: room)
    sizes = count_steps(monkeypatch)

    out = RunTogether.apply(Frame(Alone(), True, x, x, 0.0, (1e-5, 1e-5)), *parameters)[:WINDOW]
    if dtype == torch.float32:
        assert sizes == [size for size in at_once for _ in range(2)]
    sizes.clear()
    got_grads = torch.autograd.grad([out[t] for t in seen], parameters, [grad] * len(seen))

    for mine, theirs in zip([*out, *got_grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    is_kept = dtype == torch.float32 and seen == [2] and room >= NODES
    assert len(sizes) == (0 if is_kept else 2)


@pytest.mark.parametrize("window", [1, WINDOW])
def test_rows_that_are_written_to_leave_gradients_as_they_were(window):
    torch.manual_seed(0)
    cells, parameters = make_parameters(torch.float32)
    x = torch.randn(window, NODES, FEATURES)
    expected = torch.autograd.grad(run_slowly(cells, x[-1]).sum(), parameters)

    out = RunTogether.apply(Frame(Alone(), True, x, x, 0.0, (1e-5, 1e-5)), *parameters)[window - 1]
    total = out.sum()
    with torch.no_grad():
        out.zero_()

    for mine, theirs in zip(torch.autograd.grad(total, parameters), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
