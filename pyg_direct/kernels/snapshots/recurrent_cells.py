"""Recurrent cells: the steps of a gated unit with reset states, of an LSTM and of a small GRU, and their adjoints.

Gated unit. The elementwise work between the products, with its adjoint:

- update and reset = sigmoid(inputs + state @ weights).
- proposed = tanh(inputs + (reset * state) @ weights).
- The next state is proposed + update * (state - proposed).

`inputs`, `[N, 3 * C]`, are the part of update, reset and proposal from features `x`, `[N, F]`: x @ weight.T + bias. If
`inputs` is empty, they are computed here. These kernels are for GPUs: on a CPU torch has vector instructions for
exponentials, which Numba's loops lack. Narrow steps of fp32 are whole kernels, including the products:
`cuda_src/gated.cu`.

LSTM from a state of zeros: out = sigmoid(expose) * tanh(sigmoid(admit) * tanh(content)). A row of `gates` begins with
the H numbers of the input gate (`admit`), as `nn.LSTM` has them. It ends with the content and the output gate
(`expose`). Between them there may be H numbers of the forget gate, which this step does not need. Biases have them. Two
layers, one after the other, are one kernel each way on a GPU, including the products: `cuda_src/recurrent.cu`.

Small GRU, for which a GPU's calls of products would take longer than the arithmetic. On a CPU torch's step takes no
longer: 0.94 to 1.07 of an epoch of EvolveGCN's with a loop of its own. Reset and update are the sigmoid of the
sum of the parts from input and state. Then content = tanh(input part + reset * state part) and out = content + update *
(state - content). Weights are `[3 * C, F]` and `[3 * C, C]`, gate by gate as `nn.GRU` has them.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_reduction, cuda, device_function, gpu_kernel, prange

# Limits of whole steps: channels, and features.
MOST_CHANNELS, MOST_FEATURES = 32, 8
# Their blocks, forward and backward: threads and blocks that a multiprocessor holds at once. Then nodes that a block
# computes at once, up to `FEW_CHANNELS` and beyond.
FEW_CHANNELS = 16
STEP_THREADS, STEP_RESIDENT, STEP_NODES = 256, 2, (256, 128)
PULL_THREADS, PULL_RESIDENT, PULL_NODES = 64, 4, (64, 32)

step_gated = device_function("step_gated", "u8 u8 u8 i8 i4 i4 u8")
pull_gated = device_function("pull_gated", "u8 u8 u8 u8 i8 i4 i4 u8 u8 u8")


@body
def add_input(inputs, x, weight, bias, n, at, width, features):
    """Part of node n's features in the gate `at` of `width`."""
    if inputs.shape[0] > 0:
        return inputs[n * width + at]
    total = bias[at]
    for k in range(features):
        total += x[n * features + k] * weight[at * features + k]
    return total


@body
def sigmoid(value, one):
    """1 / (1 + exp(-value)); 1 is given in the precision of the value."""
    return one / (one + math.exp(-value))


@gpu_kernel("T[] T[] T[] T[] T[] i8 i4 i4 T[] T[]", T=("f4", "f8"))
def open_gates_gpu(inputs, x, weight, bias, state, count, channels, features, gates, shown):
    """Update and reset in place of the state's part of them, `gates` `[N, 2 * C]`, and reset * state, `shown` `[N, C]`;
    a thread for each of the N * C numbers.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        at = n * 2 * channels + c
        value = gates[at] + add_input(inputs, x, weight, bias, n, c, 3 * channels, features)
        gates[at] = sigmoid(value, one)
        value = gates[at + channels] + add_input(inputs, x, weight, bias, n, channels + c, 3 * channels, features)
        reset = sigmoid(value, one)
        gates[at + channels] = reset
        shown[i] = reset * state[i]
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] T[] T[] i8 i4 i4 T[] T[]", T=("f4", "f8"))
def close_gates_gpu(inputs, x, weight, bias, state, gates, count, channels, features, proposed, out):
    """The proposal in place of `shown`'s part of it, `proposed` `[N, C]`, and the next state, `out`."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < count:
        n = i // channels
        c = i - n * channels
        value = proposed[i] + add_input(inputs, x, weight, bias, n, 2 * channels + c, 3 * channels, features)
        value = math.tanh(value)
        proposed[i] = value
        out[i] = value + gates[n * 2 * channels + c] * (state[i] - value)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] i8 i4 T[]", T=("f4", "f8"))
def pull_close_gpu(grad, state, gates, proposed, count, channels, to_inputs):
    """Gradients before the activations of update and proposal, in `to_inputs` `[N, 3 * C]`."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        update, value = gates[n * 2 * channels + c], proposed[i]
        at = n * 3 * channels + c
        to_inputs[at] = grad[i] * (state[i] - value) * update * (one - update)
        to_inputs[at + 2 * channels] = grad[i] * (one - update) * (one - value * value)
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] T[] T[] i8 i4 T[] T[]", T=("f4", "f8"))
def pull_open_gpu(grad, state, gates, to_shown, count, channels, to_inputs, to_state):
    """Gradient before the activation of the reset, in `to_inputs`, and of the state without the part through the gates'
    weights.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    one = state.dtype.type(1)
    while i < count:
        n = i // channels
        c = i - n * channels
        at = n * 2 * channels + c
        update, reset = gates[at], gates[at + channels]
        to_inputs[n * 3 * channels + channels + c] = to_shown[i] * state[i] * reset * (one - reset)
        to_state[i] = grad[i] * update + to_shown[i] * reset
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("u8 u8 u8 i8 i4 i4 f4[] u8", sources=("gated",), resident_blocks=STEP_RESIDENT, threads=STEP_THREADS)
def step_gated_gpu(x, state, weights, num_nodes, channels, features, out, place):
    """The next state of all nodes; all by address, also `out`. `weights` are as `fold_gates_gpu` makes them."""
    step_gated(x, state, weights, num_nodes, channels, features, place)


@gpu_kernel("u8 u8 u8 u8 i8 i4 i4 u8 u8 f4[] u8", sources=("gated",), resident_blocks=PULL_RESIDENT,
            threads=PULL_THREADS)  # fmt: skip
def pull_gated_gpu(grad, x, state, weights, num_nodes, channels, features, to_state, to_inputs, sums, place):
    """Gradients of states and of the features' part, `[N, 3 * C]`, if their addresses are not 0. Each block's part of
    the gradient of weights goes to `sums` `[blocks, C + F + 1, 3 * C]`.
    """
    pull_gated(grad, x, state, weights, num_nodes, channels, features, to_state, to_inputs, place)


@body
def pick(g, at, update, reset, proposal):
    """Number `at` of the array of gate g."""
    if g == 0:
        return update[at]
    return reset[at] if g == 1 else proposal[at]


_PARAMETERS = " ".join(["f4[]"] * 12)


@gpu_kernel(f"{_PARAMETERS} i4 i4 f4[]")
def fold_gates_gpu(conv_z, conv_r, conv_h, conv_bias_z, conv_bias_r, conv_bias_h, linear_z, linear_r, linear_h,
                   linear_bias_z, linear_bias_r, linear_bias_h, channels, features, weights):  # fmt: skip
    """Map from states and features to the gates, `weights` `[C + F + 1, 3 * C]`: rows of states, of features, and the
    bias. It is made from convolutions `[C, F]` and `[C]`, and from the linear layers after them, `[C, 2 * C]` and
    `[C]`. The right half of a linear layer sees the state. A thread for each number.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < 3 * channels * (channels + features + 1):
        row = i // (3 * channels)
        g = i // channels % 3
        c = i % channels
        at = c * 2 * channels
        f = row - channels
        if row < channels:
            total = pick(g, at + channels + row, linear_z, linear_r, linear_h)
        elif f < features:
            total = np.float32(0)
            for k in range(channels):
                left = pick(g, at + k, linear_z, linear_r, linear_h)
                total += left * pick(g, k * features + f, conv_z, conv_r, conv_h)
        else:
            total = pick(g, c, linear_bias_z, linear_bias_r, linear_bias_h)
            for k in range(channels):
                left = pick(g, at + k, linear_z, linear_r, linear_h)
                total += left * pick(g, k, conv_bias_z, conv_bias_r, conv_bias_h)
        weights[i] = total
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel(f"f4[] {_PARAMETERS} i4 i4 f4[]")
def unfold_gates_gpu(grad, conv_z, conv_r, conv_h, conv_bias_z, conv_bias_r, conv_bias_h, linear_z, linear_r, linear_h,
                     linear_bias_z, linear_bias_r, linear_bias_h, channels, features, out):  # fmt: skip
    """Gradients of the folded parameters, from the gradient of `weights`: one after the other, `[3, C, F]`, `[3, C]`,
    `[3, C, 2 * C]` and `[3, C]`. A thread for each number.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    of_bias = 3 * channels * features
    of_linear = of_bias + 3 * channels
    of_last = of_linear + 6 * channels * channels
    wide = 3 * channels
    inputs = channels * wide
    last = (channels + features) * wide
    while i < of_last + 3 * channels:
        total = np.float32(0)
        if i < of_linear:
            # For row k of a convolution: one of its features, or its bias.
            at = i if i < of_bias else i - of_bias
            size = features if i < of_bias else 1
            g = at // (channels * size)
            k = at // size % channels
            source = (inputs + at % size * wide if i < of_bias else last) + g * channels
            for c in range(channels):
                total += pick(g, c * 2 * channels + k, linear_z, linear_r, linear_h) * grad[source + c]
        elif i < of_last:
            at = i - of_linear
            g = at // (2 * channels * channels)
            c = at // (2 * channels) % channels
            k = at % (2 * channels)
            if k >= channels:
                total = grad[(k - channels) * wide + g * channels + c]
            else:
                total = pick(g, k, conv_bias_z, conv_bias_r, conv_bias_h) * grad[last + g * channels + c]
                for f in range(features):
                    own = grad[inputs + f * wide + g * channels + c]
                    total += pick(g, k * features + f, conv_z, conv_r, conv_h) * own
        else:
            total = grad[last + i - of_last]
        out[i] = total
        i += np.int64(cuda.gridDim.x) * THREADS


# x P(x^2) / Q(x^2) with the least relative error for these degrees up to 7.9, above which tanh is 1.
_BOUND = np.float32(7.9)
_P0, _P1, _P2 = np.float32(0.999999994), np.float32(0.134506389), np.float32(0.00357901364)
_P3, _P4 = np.float32(2.20235981e-05), np.float32(1.5428464e-08)
_Q1, _Q2 = np.float32(0.467839669), np.float32(0.0261923205)
_Q3, _Q4 = np.float32(0.000342368575), np.float32(8.59898024e-07)
_ONE, _HALF = np.float32(1), np.float32(0.5)
# Rows that a thread processes at once.
_ROWS = 64
# Limit of two layers in one kernel: numbers of a state. Their blocks, forward and backward: threads and blocks that a
# multiprocessor holds at once. Then rows that a block computes at once, up to `FEW_NUMBERS` and beyond.
MOST_NUMBERS, FEW_NUMBERS = 32, 16
OPEN_THREADS, OPEN_RESIDENT, OPEN_ROWS = 128, 4, (128, 64)
# Backward threads and blocks are `PULL_THREADS` and `PULL_RESIDENT`.
PULL_ROWS = (64, 32)

open_two = device_function("open_two", "u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 u8")
pull_two = device_function("pull_two", "u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 u8 u8 u8 u8 u8 u8")
_ADDRESSES = " ".join(["u8"] * 9)


@body
def clamp(x):
    """Argument of tanh, limited to its range."""
    x = _BOUND if x > _BOUND else x
    return -_BOUND if x < -_BOUND else x


@body
def over(x):
    """Numerator of tanh, of a clamped number."""
    s = x * x
    return x * ((((_P4 * s + _P3) * s + _P2) * s + _P1) * s + _P0)


@body
def under(x):
    """Denominator of tanh, of a clamped number."""
    s = x * x
    return (((_Q4 * s + _Q3) * s + _Q2) * s + _Q1) * s + _ONE


@body
def bend(x):
    """tanh, in operations that a loop can vectorize; its error is at most 4 in ten million."""
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
    # Unsigned indices never count from the end of an array, so loops need no test for each number.
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
    """`out` like `gates`, except for the forget gate, which is left unchanged."""
    size, width = np.uint64(grad.shape[1]), np.uint64(gates.shape[1])
    both, given, of_states, pulled = bias + state_bias, gates.reshape(-1), grad.reshape(-1), out.reshape(-1)
    contents, exposing = np.uint64(2) * size, np.uint64(3) * size
    for part in prange(-(-grad.shape[0] // _ROWS)):
        a, c = np.empty(size, np.float32), np.empty(size, np.float32)
        e, cell = np.empty(size, np.float32), np.empty(size, np.float32)
        for r in range(part * _ROWS, min(part * _ROWS + _ROWS, grad.shape[0])):
            of_row, of_state = np.uint64(r) * width, np.uint64(r) * size
            of_content, of_exposing = of_row + width - contents, of_row + width - size
            # Each loop writes to one array, because only such loops are vectorized.
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
    """States of two layers, one after the other, from rows in `first` and `second` `[N, W, H]`; to `out`
    `[W, N, 2 * H + F]`, beside the features `x` `[W, N, F]`. All by address, also `out`.
    """
    open_two(first, second, x, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window, size,
             features, place)  # fmt: skip


@gpu_kernel(f"{_ADDRESSES} i4 i4 i4 i4 i4 i4 u8 u8 u8 u8 u8 f4[] u8", sources=("recurrent",),
            resident_blocks=PULL_RESIDENT, threads=PULL_THREADS)  # fmt: skip
def pull_two_gpu(grad, first, second, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window,
                 begin, seen, size, features, gates, gates_2, rows, states, to_first, to_second, place):  # fmt: skip
    """Gradients of `open_two_gpu` for the `seen` snapshots from `begin` on, from `[N, S, 2 * H + F]`. They are the
    gradients of the gates of both layers, `[N * S, 4 * H]`, and of `first` and `second`, `[N, S, H]`. `rows` and
    `states` become the inputs of the layers, `[N * S, 2 * H]` and `[N * S, H]`. All by address, also `to_second`.
    """
    pull_two(grad, first, second, weight, bias, state_bias, weight_2, bias_2, state_bias_2, num_nodes, window, begin,
             seen, size, features, gates, gates_2, rows, states, to_first, place)  # fmt: skip


@gpu_kernel("f4[] f4[] f4[] f4[] f4[] f4[] i4 i4 i4 f4[] f4[]")
def step_gru_gpu(x, state, of_input, of_state, bias, state_bias, rows, width, size, kept, out):
    """A thread for each number of `out`. The gradient needs `kept` `[N, 4 * C]`: reset, update, content and the state's
    part of the content.
    """
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    while i < rows * size:
        r = i // size
        u = i - r * size
        reset, update, content = bias[u], bias[size + u], bias[2 * size + u]
        to_reset, to_update, added = state_bias[u], state_bias[size + u], state_bias[2 * size + u]
        for k in range(width):
            factor = x[r * width + k]
            reset += factor * of_input[u * width + k]
            update += factor * of_input[(size + u) * width + k]
            content += factor * of_input[(2 * size + u) * width + k]
        for k in range(size):
            factor = state[r * size + k]
            to_reset += factor * of_state[u * size + k]
            to_update += factor * of_state[(size + u) * size + k]
            added += factor * of_state[(2 * size + u) * size + k]
        reset = _ONE / (_ONE + math.exp(-(reset + to_reset)))
        update = _ONE / (_ONE + math.exp(-(update + to_update)))
        content = math.tanh(content + reset * added)
        at = r * 4 * size + u
        kept[at], kept[at + size], kept[at + 2 * size], kept[at + 3 * size] = reset, update, content, added
        out[i] = content + update * (state[i] - content)
        i += cuda.gridDim.x * THREADS


@body
def pull_gate(grad, state, kept, size, r, k, is_of_state):
    """The gradient of the part of a gate from the input, or state, number k of the 3 * C of row r."""
    g = k // size
    u = k - g * size
    at = r * 4 * size + u
    reset, update, content = kept[at], kept[at + size], kept[at + 2 * size]
    given = grad[r * size + u]
    if g == 1:
        return given * (state[r * size + u] - content) * update * (_ONE - update)
    of_content = given * (_ONE - update) * (_ONE - content * content)
    if g == 0:
        return of_content * kept[at + 3 * size] * reset * (_ONE - reset)
    return of_content * reset if is_of_state else of_content


@gpu_kernel("f4[] f4[] f4[] f4[] f4[] f4[] i4 i4 i4 f4[]")
def pull_gru_gpu(grad, x, state, of_input, of_state, kept, rows, width, size, out):
    """Gradients of all inputs, one after the other: of x, of the state, of the weights of inputs and of states, and of
    both biases. A thread for each number, which adds up its terms in a fixed order.
    """
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    to_state = rows * width
    to_input = to_state + rows * size
    to_weight = to_input + 3 * size * width
    to_bias = to_weight + 3 * size * size
    while i < to_bias + 6 * size:
        total = np.float32(0)
        if i < to_state:
            r = i // width
            f = i - r * width
            for k in range(3 * size):
                total += pull_gate(grad, state, kept, size, r, k, False) * of_input[k * width + f]
        elif i < to_input:
            at = i - to_state
            r = at // size
            u = at - r * size
            total = grad[at] * kept[r * 4 * size + size + u]
            for k in range(3 * size):
                total += pull_gate(grad, state, kept, size, r, k, True) * of_state[k * size + u]
        elif i < to_weight:
            k = (i - to_input) // width
            f = i - to_input - k * width
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, False) * x[r * width + f]
        elif i < to_bias:
            k = (i - to_weight) // size
            u = i - to_weight - k * size
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, True) * state[r * size + u]
        else:
            k = (i - to_bias) % (3 * size)
            for r in range(rows):
                total += pull_gate(grad, state, kept, size, r, k, i - to_bias >= 3 * size)
        out[i] = total
        i += cuda.gridDim.x * THREADS
