// The gated step of T-GCN in one pass over nodes, and its gradient in another; see pyg_direct/kernels/gated.py.
//
// A warp sees to a few nodes, a thread to one channel of each of them; weights and the rows of a block's nodes lie in
// shared memory. Nothing but features, states and gradients is read, and nothing but states and gradients written.
// Functions follow Numba's calling convention: the first parameter is the place for a result, and the return value 0
// means success.

#include "items.cuh"

// As in pyg_direct/kernels/gated.py: threads of a block, and features at most, with a one behind them for the bias.
const int BLOCK = 256, WIDEST = 32, MOST_INPUTS = 20;
// Nodes that a thread sees to at once: what is read of weights serves all of them.
const int ROUNDS = 4;

// For up to P channels, which divides a warp; what is beyond is zero.
template <int P>
struct Tile {
    static const int nodes = ROUNDS * BLOCK / P;
    float rows[nodes][P], shown[nodes][P], update[nodes][P], reset[nodes][P], proposal[nodes][P];
    float x[nodes][MOST_INPUTS];
    float of_update[P][P + 1], of_reset[P][P + 1], of_proposal[P][P + 1], of_input[MOST_INPUTS][3 * P];
};

__device__ __forceinline__ float item(const float4 &four, int i)
{
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

struct Weights {
    // [3 * C, F] and [3 * C]; [C, 2 * C] and [C, C], of whose items the places are told by two strides each.
    const float *weight, *bias, *of_gates, *of_proposal;
    int gates_row, gates_column, proposal_row, proposal_column;
};

template <int P>
__device__ __forceinline__ void read_weights(Tile<P> &tile, const Weights &given, int channels, int features)
{
    for (int i = threadIdx.x; i < P * P; i += BLOCK) {
        const int k = i / P, c = i % P;
        const bool is_one = k < channels && c < channels;
        const float *gates = given.of_gates + k * given.gates_row;
        tile.of_update[k][c] = is_one ? gates[c * given.gates_column] : 0.0f;
        tile.of_reset[k][c] = is_one ? gates[(channels + c) * given.gates_column] : 0.0f;
        tile.of_proposal[k][c] =
            is_one ? given.of_proposal[k * given.proposal_row + c * given.proposal_column] : 0.0f;
    }
    for (int i = threadIdx.x; i < MOST_INPUTS * 3 * P; i += BLOCK) {
        const int f = i / (3 * P), column = i % (3 * P), at = column / P * channels + column % P;
        const bool is_one = column % P < channels && f <= features;
        tile.of_input[f][column] = !is_one ? 0.0f : f < features ? given.weight[at * features + f] : given.bias[at];
    }
}

// The first of the nodes of this warp in its tile, and its nodes.
template <int P>
__device__ __forceinline__ int first_of_warp() { return threadIdx.x / 32 * (ROUNDS * 32 / P); }

// The node of this thread in a round, counted in its tile.
template <int P>
__device__ __forceinline__ int node_of(int round) { return first_of_warp<P>() + round * (32 / P) + threadIdx.x % 32 / P; }

// Features of this warp's nodes, and a one.
template <int P>
__device__ __forceinline__ void read_features(Tile<P> &tile, const float *x, long long base, long long num_nodes,
                                              int features)
{
    const int inputs = (features + 4) & ~3;
    for (int i = threadIdx.x % 32; i < ROUNDS * 32 / P * inputs; i += 32) {
        const int n = first_of_warp<P>() + i / inputs, f = i % inputs;
        tile.x[n][f] = f < features && base + n < num_nodes ? x[(base + n) * features + f] : f == features ? 1.0f : 0.0f;
    }
}

// sums[r] += rows[node of round r] @ weights[:, c], or @ weights[c, :]; for two matrices at once, or one.
template <int P, bool TRANSPOSED>
__device__ __forceinline__ void multiply(const float (*rows)[P], const float (*weights)[P + 1], int c, float *sums)
{
#pragma unroll
    for (int k = 0; k < P; k += 4) {
        float4 row[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) row[r] = *reinterpret_cast<const float4 *>(&rows[node_of<P>(r)][k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float factor = TRANSPOSED ? weights[c][k + i] : weights[k + i][c];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) sums[r] += item(row[r], i) * factor;
        }
    }
}

// What features and state add to update and reset, and features to the proposal; then both gates, and the state that
// the reset lets through, in `tile.shown`.
template <int P>
__device__ __forceinline__ void open_gates(Tile<P> &tile, const float *state, int c, bool is_channel, int features,
                                           float *update, float *reset, float *proposal)
{
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) update[r] = reset[r] = proposal[r] = 0.0f;
    for (int f = 0; f <= features; f += 4) {
        float4 row[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) row[r] = *reinterpret_cast<const float4 *>(&tile.x[node_of<P>(r)][f]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float *factors = tile.of_input[f + i] + c;
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                update[r] += item(row[r], i) * factors[0];
                reset[r] += item(row[r], i) * factors[P];
                proposal[r] += item(row[r], i) * factors[2 * P];
            }
        }
    }
    multiply<P, false>(tile.rows, tile.of_update, c, update);
    multiply<P, false>(tile.rows, tile.of_reset, c, reset);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        update[r] = sigmoid(update[r]), reset[r] = sigmoid(reset[r]);
        tile.shown[node_of<P>(r)][c] = is_channel ? reset[r] * state[r] : 0.0f;
    }
    __syncwarp();
    multiply<P, false>(tile.shown, tile.of_proposal, c, proposal);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) proposal[r] = tanhf(proposal[r]);
}

// Numbers of this thread's nodes and channel, zero beyond them, of rows `[N, C]`.
template <int P>
__device__ __forceinline__ void read_rows(const float *from, long long base, long long num_nodes, int channels, int c,
                                          float *to)
{
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const long long n = base + node_of<P>(r);
        to[r] = c < channels && n < num_nodes ? from[n * channels + c] : 0.0f;
    }
}

template <int P>
__device__ __forceinline__ void step(Tile<P> &tile, const float *x, const float *state, const Weights &given,
                                     long long num_nodes, int channels, int features, float *out)
{
    const int c = threadIdx.x % P;
    read_weights(tile, given, channels, features);
    __syncthreads();
    for (long long base = (long long)blockIdx.x * tile.nodes; base < num_nodes;
         base += (long long)gridDim.x * tile.nodes) {
        float before[ROUNDS], update[ROUNDS], reset[ROUNDS], proposal[ROUNDS];
        read_rows<P>(state, base, num_nodes, channels, c, before);
        __syncwarp();
        read_features(tile, x, base, num_nodes, features);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) tile.rows[node_of<P>(r)][c] = before[r];
        __syncwarp();
        open_gates(tile, before, c, c < channels, features, update, reset, proposal);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const long long n = base + node_of<P>(r);
            if (c < channels && n < num_nodes)
                out[n * channels + c] = proposal[r] + update[r] * (before[r] - proposal[r]);
        }
    }
}

// What the gradients of a tile's nodes add to those of the weights: a thread has four rows of one column of each gate.
// `sums` are of the update, the reset and the proposal, whose row is another.
template <int WIDTH, int OTHER, int P>
__device__ __forceinline__ void add_products(const Tile<P> &tile, const float (*rows)[WIDTH],
                                             const float (*of_proposal)[OTHER], int row, int c, int slice, int slices,
                                             float (*sums)[4])
{
    for (int n = slice; n < tile.nodes; n += slices) {
        const float4 own = *reinterpret_cast<const float4 *>(&rows[n][row]);
        const float4 other = *reinterpret_cast<const float4 *>(&of_proposal[n][row]);
        const float update = tile.update[n][c], reset = tile.reset[n][c], proposal = tile.proposal[n][c];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[0][i] += item(own, i) * update;
            sums[1][i] += item(own, i) * reset;
            sums[2][i] += item(other, i) * proposal;
        }
    }
}

// The sums of all slices of threads, one after the other, from `place` `[rows, 3 * P]` to `out` `[rows, 3 * C]`.
template <int P>
__device__ __forceinline__ void write_sums(const float (*sums)[4], float *place, int row, int c, int slice, int slices,
                                           int rows, int channels, float *out)
{
    for (int turn = 0; turn < slices; ++turn) {
        __syncthreads();
        if (slice == turn)
            for (int gate = 0; gate < 3; ++gate)
                for (int i = 0; i < 4; ++i) {
                    float *one = place + (row + i) * 3 * P + gate * P + c;
                    *one = turn == 0 ? sums[gate][i] : *one + sums[gate][i];
                }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * 3 * P; i += BLOCK) {
        const int column = i % (3 * P);
        if (column % P < channels) out[i / (3 * P) * 3 * channels + column / P * channels + column % P] = place[i];
    }
}

template <int P>
__device__ __forceinline__ void pull(Tile<P> &tile, const float *grad, const float *x, const float *state,
                                     const Weights &given, long long num_nodes, int channels, int features,
                                     float *to_state, float *to_inputs, float *to_weights)
{
    const int c = threadIdx.x % P;
    const bool is_channel = c < channels;
    // Threads that share out four rows of each gate's columns, of states and of features.
    const int unit = P / 4 * P, row = threadIdx.x % unit / P * 4, slice = threadIdx.x / unit, slices = BLOCK / unit;
    const int input_unit = (features + 4) / 4 * P, input_row = threadIdx.x % input_unit / P * 4;
    const int input_slice = threadIdx.x / input_unit, input_slices = BLOCK / input_unit;
    float sums[3][4] = {}, input_sums[3][4] = {};
    read_weights(tile, given, channels, features);
    for (long long base = (long long)blockIdx.x * tile.nodes; base < num_nodes;
         base += (long long)gridDim.x * tile.nodes) {
        float before[ROUNDS], after[ROUNDS], update[ROUNDS], reset[ROUNDS], proposal[ROUNDS], to_shown[ROUNDS];
        read_rows<P>(state, base, num_nodes, channels, c, before);
        read_rows<P>(grad, base, num_nodes, channels, c, after);
        __syncthreads();
        read_features(tile, x, base, num_nodes, features);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) tile.rows[node_of<P>(r)][c] = before[r];
        __syncthreads();
        open_gates(tile, before, c, is_channel, features, update, reset, proposal);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int n = node_of<P>(r);
            const float of_update = after[r] * (before[r] - proposal[r]) * update[r] * (1.0f - update[r]);
            const float of_proposal = after[r] * (1.0f - update[r]) * (1.0f - proposal[r] * proposal[r]);
            const bool is_one = is_channel && base + n < num_nodes;
            tile.update[n][c] = is_one ? of_update : 0.0f;
            tile.proposal[n][c] = is_one ? of_proposal : 0.0f;
            to_shown[r] = 0.0f;
        }
        __syncwarp();
        multiply<P, true>(tile.proposal, tile.of_proposal, c, to_shown);
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const float of_reset = to_shown[r] * before[r] * reset[r] * (1.0f - reset[r]);
            tile.reset[node_of<P>(r)][c] = is_channel && base + node_of<P>(r) < num_nodes ? of_reset : 0.0f;
            after[r] = after[r] * update[r] + to_shown[r] * reset[r];
        }
        __syncthreads();
        if (to_inputs != nullptr)
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const int n = node_of<P>(r);
                if (!is_channel || base + n >= num_nodes) continue;
                float *place = to_inputs + (base + n) * 3 * channels + c;
                place[0] = tile.update[n][c], place[channels] = tile.reset[n][c];
                place[2 * channels] = tile.proposal[n][c];
            }
        if (to_state != nullptr) {
            multiply<P, true>(tile.update, tile.of_update, c, after);
            multiply<P, true>(tile.reset, tile.of_reset, c, after);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                const long long n = base + node_of<P>(r);
                if (is_channel && n < num_nodes) to_state[n * channels + c] = after[r];
            }
        }
        add_products(tile, tile.rows, tile.shown, row, c, slice, slices, sums);
        if (input_slice < input_slices)
            add_products(tile, tile.x, tile.x, input_row, c, input_slice, input_slices, input_sums);
    }
    // Rows of states, then of features, then the bias.
    float *out = to_weights + (long long)blockIdx.x * (channels + features + 1) * 3 * channels;
    float *place = &tile.rows[0][0];
    write_sums<P>(sums, place, row, c, slice, slices, channels, channels, out);
    write_sums<P>(input_sums, place, input_row, c, input_slice < input_slices ? input_slice : -1, input_slices,
                  features + 1, channels, out + channels * 3 * channels);
}

#define MEMORY __shared__ __align__(16) unsigned char memory[sizeof(Tile<WIDEST>)]

extern "C" __device__ int step_gated(int *, u64 x, u64 state, u64 weight, u64 bias, u64 of_gates, u64 of_proposal,
                                     int gates_row, int gates_column, int proposal_row, int proposal_column,
                                     long long num_nodes, int channels, int features, u64 out)
{
    MEMORY;
    const Weights given = {reinterpret_cast<const float *>(weight), reinterpret_cast<const float *>(bias),
                           reinterpret_cast<const float *>(of_gates), reinterpret_cast<const float *>(of_proposal),
                           gates_row, gates_column, proposal_row, proposal_column};
    const float *rows = reinterpret_cast<const float *>(x), *before = reinterpret_cast<const float *>(state);
    float *to = reinterpret_cast<float *>(out);
    if (channels <= 16)
        step(*reinterpret_cast<Tile<16> *>(memory), rows, before, given, num_nodes, channels, features, to);
    else
        step(*reinterpret_cast<Tile<32> *>(memory), rows, before, given, num_nodes, channels, features, to);
    return 0;
}

extern "C" __device__ int pull_gated(int *, u64 grad, u64 x, u64 state, u64 weight, u64 bias, u64 of_gates,
                                     u64 of_proposal, int gates_row, int gates_column, int proposal_row,
                                     int proposal_column, long long num_nodes, int channels, int features,
                                     u64 to_state, u64 to_inputs, u64 to_weights)
{
    MEMORY;
    const Weights given = {reinterpret_cast<const float *>(weight), reinterpret_cast<const float *>(bias),
                           reinterpret_cast<const float *>(of_gates), reinterpret_cast<const float *>(of_proposal),
                           gates_row, gates_column, proposal_row, proposal_column};
    const float *after = reinterpret_cast<const float *>(grad), *rows = reinterpret_cast<const float *>(x);
    const float *before = reinterpret_cast<const float *>(state);
    float *out[3] = {reinterpret_cast<float *>(to_state), reinterpret_cast<float *>(to_inputs),
                     reinterpret_cast<float *>(to_weights)};
    if (channels <= 16)
        pull(*reinterpret_cast<Tile<16> *>(memory), after, rows, before, given, num_nodes, channels, features, out[0],
             out[1], out[2]);
    else
        pull(*reinterpret_cast<Tile<32> *>(memory), after, rows, before, given, num_nodes, channels, features, out[0],
             out[1], out[2]);
    return 0;
}
