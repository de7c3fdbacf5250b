// The gated step of T-GCN in one pass over nodes, and its gradient in another; see
// pyg_direct/kernels/snapshots/recurrent_cells.py.
//
// Only features, states and gradients are read, and only states and gradients are written. Functions follow Numba's
// calling convention: the first parameter is the address for a result, and the return value 0 means success.

#include "gates.cuh"

template <int P>
struct StepMemory {
    typedef Layout<P, STEP_THREADS> At;
    float rows[At::nodes][At::row], x[At::nodes][INPUTS];
    Weights<P> weights;
};

// States, states times resets, and gradients before the activations of the gates and the proposal.
template <int P>
struct PullMemory {
    typedef Layout<P, PULL_THREADS> At;
    float rows[At::nodes][At::row], shown[At::nodes][At::row], gates[3][At::nodes][At::row], x[At::nodes][INPUTS];
    Weights<P> weights;
};

template <int P>
__device__ __forceinline__ void step(StepMemory<P> &memory, const Given &given, float *out)
{
    GatedShare<P, STEP_THREADS> own(given);
    const int nodes = Layout<P, STEP_THREADS>::nodes;
    read_weights<P, STEP_THREADS>(memory.weights, given);
    __syncthreads();
    for (own.base = (long long)blockIdx.x * nodes; own.base < given.num_nodes;
         own.base += (long long)gridDim.x * nodes) {
        float before[ROUNDS][OWN], gates[3][ROUNDS][OWN];
        own.read(given.state, before);
        // Only its own warp uses these rows.
        __syncwarp();
        own.read_features(memory.x, given);
        own.put(memory.rows, before);
        __syncwarp();
        own.open(memory.rows, memory.rows, memory.x, memory.weights, given.features, gates);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (own.has(r, i))
                    out[own.place(r, i)] = gates[2][r][i] + gates[0][r][i] * (before[r][i] - gates[2][r][i]);
    }
}

// Part of the gradients of the weights of states from a tile's nodes: a thread has four rows of four columns of each
// gate, from every so many nodes.
template <int P>
__device__ __forceinline__ void add_products(const PullMemory<P> &memory, int row, int column, int slice, int slices,
                                             float (*sums)[4][4])
{
#pragma unroll 2
    for (int n = slice; n < Layout<P, PULL_THREADS>::nodes; n += slices) {
        const float4 rows[2] = {four_of(&memory.rows[n][row]), four_of(&memory.shown[n][row])};
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const float4 grad = four_of(&memory.gates[gate][n][column]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[gate][i][j] += item(rows[gate / 2], i) * item(grad, j);
        }
    }
}

// The same for the weights of features, four rows of one column of each gate, and for the bias, the last.
template <int P>
__device__ __forceinline__ void add_inputs(const PullMemory<P> &memory, int row, int c, int slice, int slices,
                                           float (*sums)[5])
{
#pragma unroll 2
    for (int n = slice; n < Layout<P, PULL_THREADS>::nodes; n += slices) {
        const float4 x = four_of(&memory.x[n][row]);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const float grad = memory.gates[gate][n][c];
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[gate][i] += item(x, i) * grad;
            sums[gate][4] += grad;
        }
    }
}

// Adds a number to its position in the sums of all threads, which take turns.
__device__ __forceinline__ void add_to(float *place, float value, bool is_first)
{
    *place = is_first ? value : *place + value;
}

// Copies rows `[rows, 3 * P]` in shared memory to `[rows, 3 * C]`.
template <int P>
__device__ __forceinline__ void write_sums(const float *from, int rows, int channels, float *out)
{
    __syncthreads();
    for (int i = threadIdx.x; i < rows * 3 * P; i += PULL_THREADS) {
        const int column = i % (3 * P);
        if (column % P < channels) out[i / (3 * P) * 3 * channels + column / P * channels + column % P] = from[i];
    }
    __syncthreads();
}

template <int P>
__device__ __forceinline__ void pull(PullMemory<P> &memory, const Given &given, const float *grad, float *to_state,
                                     float *to_inputs, float *to_weights)
{
    GatedShare<P, PULL_THREADS> own(given);
    const int nodes = Layout<P, PULL_THREADS>::nodes, channels = given.channels, features = given.features;
    // Threads that share all rows and columns, of states and of features.
    const int unit = P / 4 * (P / 4), slices = PULL_THREADS / unit, slice = threadIdx.x / unit;
    const int row = threadIdx.x % unit / (P / 4) * 4, column = threadIdx.x % (P / 4) * 4;
    const int input_unit = max(1, (features + 3) / 4) * P, input_slices = PULL_THREADS / input_unit;
    const int input_slice = threadIdx.x / input_unit, input_row = threadIdx.x % input_unit / P * 4;
    const int input_column = threadIdx.x % P;
    float sums[3][4][4] = {}, input_sums[3][5] = {};
    read_weights<P, PULL_THREADS>(memory.weights, given);
    for (own.base = (long long)blockIdx.x * nodes; own.base < given.num_nodes;
         own.base += (long long)gridDim.x * nodes) {
        float before[ROUNDS][OWN], after[ROUNDS][OWN], gates[3][ROUNDS][OWN], to_shown[ROUNDS][OWN];
        own.read(given.state, before);
        own.read(grad, after);
        __syncthreads();
        own.read_features(memory.x, given);
        own.put(memory.rows, before);
        // Its memory is free until the gradient of the reset is written there.
        own.put(memory.gates[1], after);
        __syncthreads();
        own.open(memory.rows, memory.shown, memory.x, memory.weights, features, gates);
        own.take(memory.rows, before);
        own.take(memory.gates[1], after);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int n = own.node(r), c = own.channel(i);
                const float update = gates[0][r][i], closed = 1.0f - update, content = gates[2][r][i];
                const float of_update = after[r][i] * (before[r][i] - content) * update * closed;
                const float of_proposal = after[r][i] * closed * (1.0f - content * content);
                memory.gates[0][n][c] = own.has(r, i) ? of_update : 0.0f;
                memory.gates[2][n][c] = own.has(r, i) ? of_proposal : 0.0f;
                to_shown[r][i] = 0.0f;
            }
        __syncwarp();
        own.multiply_back(memory.gates[2], memory.weights.state[2], to_shown);
        own.take(memory.rows, before);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float reset = gates[1][r][i];
                const float of_reset = to_shown[r][i] * before[r][i] * reset * (1.0f - reset);
                memory.gates[1][own.node(r)][own.channel(i)] = own.has(r, i) ? of_reset : 0.0f;
                after[r][i] = after[r][i] * gates[0][r][i] + to_shown[r][i] * reset;
            }
        __syncthreads();
        if (to_state != nullptr) {
            own.multiply_back(memory.gates[0], memory.weights.state[0], after);
            own.multiply_back(memory.gates[1], memory.weights.state[1], after);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (own.has(r, i)) to_state[own.place(r, i)] = after[r][i];
        }
        if (to_inputs != nullptr)
            for (int i = threadIdx.x; i < nodes * 3 * channels; i += PULL_THREADS) {
                const int n = i / (3 * channels), c = i % (3 * channels);
                if (own.base + n < given.num_nodes)
                    to_inputs[own.base * 3 * channels + i] = memory.gates[c / channels][n][c % channels];
            }
        add_products(memory, row, column, slice, slices, sums);
        if (input_slice < input_slices)
            add_inputs(memory, input_row, input_column, input_slice, input_slices, input_sums);
    }
    // In the layout of the weights.
    float *out = to_weights + (long long)blockIdx.x * (channels + features + 1) * 3 * channels;
    float *place = &memory.rows[0][0];
    for (int turn = 0; turn < slices; ++turn) {
        __syncthreads();
        if (slice == turn)
#pragma unroll
            for (int at = 0; at < 48; ++at) {
                const int gate = at / 16, i = at / 4 % 4, j = at % 4;
                add_to(place + (row + i) * 3 * P + gate * P + column + j, sums[gate][i][j], turn == 0);
            }
    }
    write_sums<P>(place, channels, channels, out);
    for (int turn = 0; turn < input_slices; ++turn) {
        __syncthreads();
        if (input_slice == turn)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                const int c = gate * P + input_column;
#pragma unroll
                for (int i = 0; i < 4; ++i) add_to(place + (input_row + i) * 3 * P + c, input_sums[gate][i], turn == 0);
                if (input_row == 0) add_to(place + INPUTS * 3 * P + c, input_sums[gate][4], turn == 0);
            }
    }
    write_sums<P>(place, features, channels, out + channels * 3 * channels);
    write_sums<P>(place + INPUTS * 3 * P, 1, channels, out + (channels + features) * 3 * channels);
}

#define GIVEN                                                                                                       \
    {reinterpret_cast<const float *>(x), reinterpret_cast<const float *>(state),                                    \
     reinterpret_cast<const float *>(weights), num_nodes, channels, features}

extern "C" __device__ int step_gated(int *, u64 x, u64 state, u64 weights, long long num_nodes, int channels,
                                     int features, u64 out)
{
    const int size = sizeof(StepMemory<32>) > sizeof(StepMemory<16>) ? sizeof(StepMemory<32>) : sizeof(StepMemory<16>);
    __shared__ __align__(16) unsigned char memory[size];
    const Given given = GIVEN;
    float *to = reinterpret_cast<float *>(out);
    if (channels <= 16)
        step(*reinterpret_cast<StepMemory<16> *>(memory), given, to);
    else
        step(*reinterpret_cast<StepMemory<32> *>(memory), given, to);
    return 0;
}

extern "C" __device__ int pull_gated(int *, u64 grad, u64 x, u64 state, u64 weights, long long num_nodes, int channels,
                                     int features, u64 to_state, u64 to_inputs, u64 to_weights)
{
    const int size = sizeof(PullMemory<32>) > sizeof(PullMemory<16>) ? sizeof(PullMemory<32>) : sizeof(PullMemory<16>);
    __shared__ __align__(16) unsigned char memory[size];
    const Given given = GIVEN;
    const float *after = reinterpret_cast<const float *>(grad);
    float *states = reinterpret_cast<float *>(to_state), *inputs = reinterpret_cast<float *>(to_inputs);
    float *sums = reinterpret_cast<float *>(to_weights);
    if (channels <= 16)
        pull(*reinterpret_cast<PullMemory<16> *>(memory), given, after, states, inputs, sums);
    else
        pull(*reinterpret_cast<PullMemory<32> *>(memory), given, after, states, inputs, sums);
    return 0;
}
