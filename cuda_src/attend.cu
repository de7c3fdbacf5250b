// Sums of table rows in 16-byte pieces over the edges of targets, weighted by a softmax over them.
//
// Called from pyg_direct/kernels/aggregate/softmax.py, which has the formula; see aggregate.cu for the calling
// convention.

#include "attention.cuh"
#include "items.cuh"

// Arguments of a kernel: addresses stay in its constant memory, because registers are for rows in flight.
template <class Index> struct Given {
    u64 to;
    const uint4 *x;
    const Index *ends, *row;
    const float *scores, *own;
    float *alpha;
    int num_edges, lanes;
    unsigned pieces, heads;
    bool loops, to_fp32;
    float slope;
};

// The `rank`-th piece of a head of the sums of `count` consecutive targets, and the weights of every `lanes`-th edge
// from the `rank`-th on. The first target, `target`, has edges [e, last). The sum is divided by the sum of the weights
// at the end, and scaled again whenever a larger score comes. So rows are requested together with the scores, and each
// is read once. Rows and ids are in flight as in aggregate.cu.
template <class Kind, class Index, bool OF_EDGES>
__device__ __forceinline__ void attend_run(const Given<Index> &given, int e, int last, int target, int count,
                                           int head, int rank)
{
    const int ROWS = 4;
    int after = last, mine_at = e + rank;
    if (count > 1) after = (int)min((long long)given.ends[target + 2], (long long)given.num_edges);
    unsigned source[ROWS];
#pragma unroll
    for (int u = 0; u < ROWS; ++u)
        if (e + u < last) source[u] = (unsigned)given.row[e + u];
    float best = LEAST, sum = 0.0f, mine = NO_SCORE, total[Kind::items] = {};
    while (true) {
        const float to_add = OF_EDGES ? 0.0f : given.own[(unsigned)target * given.heads + head];
        uint4 raw[ROWS];
        float share[ROWS];
        bool counts[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            raw[u] = make_uint4(0, 0, 0, 0);
            counts[u] = e + u < last && (!given.loops || e + u + 1 == last || source[u] != (unsigned)target);
            if (counts[u]) {
                raw[u] = given.x[(u64)source[u] * given.pieces];
                share[u] = given.scores[(OF_EDGES ? (unsigned)(e + u) : source[u]) * given.heads + head];
            }
        }
        const bool ends_here = e + ROWS >= last;
        int next = e + ROWS, next_last = last;
        if (ends_here) {
            next = last, next_last = after;
            if (count > 2) after = (int)min((long long)given.ends[target + 3], (long long)given.num_edges);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u)
            if (next + u < next_last) source[u] = (unsigned)given.row[next + u];
        float largest = best;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            share[u] = counts[u] ? bend(share[u] + to_add, given.slope) : NO_SCORE;
            if (e + u == mine_at) mine = share[u];
            largest = fmaxf(largest, share[u]);
        }
        const float shrink = __expf(best - largest);
        best = largest, sum *= shrink;
#pragma unroll
        for (int i = 0; i < Kind::items; ++i) total[i] *= shrink;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            share[u] = __expf(share[u] - best), sum += share[u];
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] += share[u] * value[i];
        }
        if (ends_here) {
            // If all scores are minus infinity, the result is a NaN, as in the softmax.
            const bool is_empty = mine_at - rank == last;
            const float scale = sum == 0.0f && !is_empty ? NOT_A_NUMBER : 1.0f / (sum + TINY);
            if (given.alpha != nullptr && mine_at < last) {
                given.alpha[(unsigned)mine_at * given.heads + head] = __expf(mine - best) * scale;
                for (int i = mine_at + given.lanes; i < last; i += given.lanes) {
                    const unsigned from = (unsigned)given.row[i];
                    float score = NO_SCORE;
                    if (!given.loops || i + 1 == last || from != (unsigned)target) {
                        score = given.scores[(OF_EDGES ? (unsigned)i : from) * given.heads + head];
                        score = bend(score + to_add, given.slope);
                    }
                    given.alpha[(unsigned)i * given.heads + head] = __expf(score - best) * scale;
                }
            }
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] *= scale;
            const int piece = head * given.lanes + rank;
            const u64 to = given.to + (u64)(unsigned)target * given.pieces * (given.to_fp32 ? Kind::items * 4 : 16);
            if constexpr (Kind::items == 4) {
                store_fp32<4>(to, piece, total);
            } else {
                if (given.to_fp32) store_fp32<8>(to, piece, total);
                else store(Kind(), to, piece, total);
            }
            if (--count == 0) break;
            ++target, mine_at = next + rank;
            best = LEAST, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < Kind::items; ++i) total[i] = 0.0f;
        }
        e = next, last = next_last;
    }
}

template <class Kind, class Index>
__device__ __forceinline__ void attend_run_of(u64 to, u64 x, u64 ends, u64 row, u64 scores, u64 own, u64 alpha,
                                              int num_edges, int first, int last, int target, int count, int heads,
                                              int lanes, int piece, int loops, float slope, bool to_fp32)
{
    // A piece never spans two heads.
    const int head = heads == 1 ? 0 : piece / lanes, rank = piece - head * lanes;
    const Given<Index> given = {
        to, reinterpret_cast<const uint4 *>(x) + piece, reinterpret_cast<const Index *>(ends),
        reinterpret_cast<const Index *>(row), reinterpret_cast<const float *>(scores),
        reinterpret_cast<const float *>(own), reinterpret_cast<float *>(alpha),
        num_edges, lanes, (unsigned)(heads * lanes), (unsigned)heads, loops != 0, to_fp32, slope};
    if (own == 0) attend_run<Kind, Index, true>(given, first, last, target, count, head, rank);
    else attend_run<Kind, Index, false>(given, first, last, target, count, head, rank);
}

// Piece `piece` of the sums for `count` targets from `target` on, and the weights of their edges, if `alpha` is not
// null. The first target has edges [first, last). Scores are of sources, to which `own` of the targets are added, or of
// edges, if `own` is null. With `loops` the last edge of each target is its loop, and other loops have weight 0. A head
// has `lanes` pieces. Kind 0 is fp32, 1 fp16, 2 bfloat16; sums are of kind `to_kind`: the kind of the rows, or fp32.
// Rows, targets and edges, times heads, are fewer than 2^31.
extern "C" __device__ int attend_run_16(int *, u64 to, u64 x, u64 ends, u64 row, int index_bytes, u64 scores, u64 own,
                                        u64 alpha, long long num_edges, long long first, long long last,
                                        long long target, int count, int heads, int lanes, int piece, int loops,
                                        float slope, int kind, int to_kind)
{
#define ATTEND(Kind, Index)                                                                                         \
    attend_run_of<Kind, Index>(to, x, ends, row, scores, own, alpha, num_edges, first, last, target, count, heads,  \
                               lanes, piece, loops, slope, to_kind == 0)
    if (index_bytes == 8) {
        if (kind == 0) ATTEND(Float32, long long);
        else if (kind == 1) ATTEND(Float16, long long);
        else ATTEND(Bfloat16, long long);
    } else {
        if (kind == 0) ATTEND(Float32, int);
        else if (kind == 1) ATTEND(Float16, int);
        else ATTEND(Bfloat16, int);
    }
#undef ATTEND
    return 0;
}
