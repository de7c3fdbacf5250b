"""The step of an LSTM from a state of zeros, and its gradient.

out = sigmoid(expose) * tanh(sigmoid(admit) * tanh(content)). A row of `gates` begins with the H numbers of the gate
that admits, as `nn.LSTM` has them, and ends with those of the content and of the gate that exposes; between them there
may be H of the gate that forgets, which such a step does not need. Biases have those.

Two layers, one behind the other, are one kernel each way on a GPU, products and all: `cuda_src/recurrent.cu`.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import body, cpu_reduction, device_function, gpu_kernel, prange

# x P(x^2) / Q(x^2) with the least relative error that there is for these degrees up to 7.9, from where on tanh is 1.
_BOUND = np.float32(7.9)
_P0, _P1, _P2 = np.float32(0.999999994), np.float32(0.134506389), np.float32(0.00357901364)
_P3, _P4 = np.float32(2.20235981e-05), np.float32(1.5428464e-08)
_Q1, _Q2 = np.float32(0.467839669), np.float32(0.0261923205)
_Q3, _Q4 = np.float32(0.000342368575), np.float32(8.59898024e-07)
_ONE, _HALF = np.float32(1), np.float32(0.5)
# Rows that a thread goes through at once.
_ROWS = 64
# What both layers in one kernel take at most: numbers of a state. Their blocks, on the way to the states and back:
# threads, how many a multiprocessor holds at once, and rows that one sees to at once, up to `FEW_NUMBERS` and beyond.
MOST_NUMBERS, FEW_NUMBERS = 32, 16
OPEN_THREADS, OPEN_RESIDENT, OPEN_ROWS = 128, 4, (128, 64)
PULL_THREADS, PULL_RESIDENT, PULL_ROWS = 64, 4, (64, 32)

open_two = device_function("open_two", "u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 u8")
pull_two = device_function("pull_two", "u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 u8 u8 u8 u8 u8 u8")
_ADDRESSES = " ".join(["u8"] * 9)


@body
def clamp(x):
    """What tanh is taken of."""
    x = _BOUND if x > _BOUND else x
    return -_BOUND if x < -_BOUND else x


@body
def over(x):
    """tanh times `under`, of what is clamped."""
    s = x * x
    return x * ((((_P4 * s + _P3) * s + _P2) * s + _P1) * s + _P0)


@body
def under(x):
    """What `over` is divided by."""
    s = x * x
    return (((_Q4 * s + _Q3) * s + _Q2) * s + _Q1) * s + _ONE


@body
def bend(x):
    """tanh, in operations that a loop can do for several numbers at once; off by 4 in ten million at most."""
    x = clamp(x)
    return over(x) / under(x)


@body
def admit(x):
    """sigmoid."""
    return bend(x * _HALF) * _HALF + _HALF


@body
def pass_gate(x, gate):
    """tanh(x) * sigmoid(gate), in one division, which takes as long as half of a tanh."""
    x, half = clamp(x), clamp(gate * _HALF)
    below = under(half)
    return over(x) * (over(half) + below) * _HALF / (under(x) * below)


@cpu_reduction
def open_lstm_cpu(gates, bias, state_bias, at, out):
    """States are written from number `at` of each row of `out` on."""
    # Unsigned ones never count from the end of an array, which loops would have to ask for each number.
    width, row_size, size = np.uint64(gates.shape[1]), np.uint64(out.shape[1]), np.uint64(bias.shape[0] // 4)
    contents, exposing = np.uint64(2) * size, np.uint64(3) * size
    given, states = gates.reshape(-1), out.reshape(-1)
    for r in prange(gates.shape[0]):
        of_row, to = np.uint64(r) * width, np.uint64(r) * row_size + np.uint64(at)
        of_content, of_exposing = of_row + width - contents, of_row + width - size
        for u in range(size):
            content = given[of_content + u] + (bias[contents + u] + state_bias[contents + u])
            cell = pass_gate(content, given[of_row + u] + (bias[u] + state_bias[u]))
            exposed = given[of_exposing + u] + (bias[exposing + u] + state_bias[exposing + u])
            states[to + u] = pass_gate(cell, exposed)


@cpu_reduction
def pull_lstm_cpu(grad, gates, bias, state_bias, out):
    """`out` like `gates`, but for the gate that forgets, which is left as it is."""
    size, width = np.uint64(grad.shape[1]), np.uint64(gates.shape[1])
    both, given, of_states, pulled = bias + state_bias, gates.reshape(-1), grad.reshape(-1), out.reshape(-1)
    contents, exposing = np.uint64(2) * size, np.uint64(3) * size
    for part in prange(-(-grad.shape[0] // _ROWS)):
        a, c = np.empty(size, np.float32), np.empty(size, np.float32)
        e, cell = np.empty(size, np.float32), np.empty(size, np.float32)
        for r in range(part * _ROWS, min(part * _ROWS + _ROWS, grad.shape[0])):
            of_row, of_state = np.uint64(r) * width, np.uint64(r) * size
            of_content, of_exposing = of_row + width - contents, of_row + width - size
            # Each loop writes to one place, as only such are done for several numbers at once.
            for u in range(size):
                a[u] = admit(given[of_row + u] + both[u])
            for u in range(size):
                c[u] = bend(given[of_content + u] + both[contents + u])
            for u in range(size):
                e[u] = admit(given[of_exposing + u] + both[exposing + u])
            for u in range(size):
                cell[u] = bend(a[u] * c[u])
            for u in range(size):
                of_cell = of_states[of_state + u] * e[u] * (_ONE - cell[u] * cell[u])
                pulled[of_row + u] = of_cell * c[u] * a[u] * (_ONE - a[u])
            for u in range(size):
                of_cell = of_states[of_state + u] * e[u] * (_ONE - cell[u] * cell[u])
                pulled[of_content + u] = of_cell * a[u] * (_ONE - c[u] * c[u])
            for u in range(size):
                pulled[of_exposing + u] = of_states[of_state + u] * cell[u] * e[u] * (_ONE - e[u])


@gpu_kernel(f"{_ADDRESSES} i4 i4 i4 i4 f4[] u8", sources=("recurrent",), resident_blocks=OPEN_RESIDENT,
            threads=OPEN_THREADS)  # fmt: skip
def open_two_gpu(first, second, x, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window, size,
                 features, out, place):  # fmt: skip
    """States of two layers, one behind the other, of rows that lie in `first` and `second` `[N, W, H]`; to `out`
    `[W, N, 2 * H + F]`, beside the features `x` `[W, N, F]`. All by address, also `out`.
    """
    open_two(first, second, x, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window, size,
             features, place)  # fmt: skip


@gpu_kernel(f"{_ADDRESSES} i4 i4 i4 i4 i4 i4 u8 u8 u8 u8 u8 f4[] u8", sources=("recurrent",),
            resident_blocks=PULL_RESIDENT, threads=PULL_THREADS)  # fmt: skip
def pull_two_gpu(grad, first, second, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window,
                 begin, seen, size, features, gates, gates_2, rows, states, to_first, to_second, place):  # fmt: skip
    """Gradients of what `open_two_gpu` gave of the `seen` snapshots from `begin` on, `[N, S, 2 * H + F]`, to those of
    the gates of both layers, `[N * S, 4 * H]`, and of `first` and `second`, `[N, S, H]`; `rows` and `states` become
    what the layers saw, `[N * S, 2 * H]` and `[N * S, H]`. All by address, also `to_second`.
    """
    pull_two(grad, first, second, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window, begin,
             seen, size, features, gates, gates_2, rows, states, to_first, place)  # fmt: skip
