// Attention of several relations over table rows in 16-byte pieces, and its gradients.
//
// Called from pyg_direct/kernels/aggregate/typed_attention.py, which has the formulas; see aggregate.cu for the calling
// convention.

#include "attention.cuh"
#include "items.cuh"
// Unpacks items.
#include "ahead.cuh"

__device__ __forceinline__ void store_as(Float32, u64 to, const float *value) { store_fp32<4>(to, 0, value); }
template <class Kind> __device__ __forceinline__ void store_as(Kind kind, u64 to, const float *value)
{
    store(kind, to, 0, value);
}

template <class Kind> __device__ __forceinline__ float dot_piece(u64 grad, u64 out)
{
    float a[Kind::items], b[Kind::items], total = 0.0f;
    unpack(Kind(), *reinterpret_cast<const uint4 *>(grad), a);
    load_fp32<Kind::items>(reinterpret_cast<const float *>(out), b);
#pragma unroll
    for (int i = 0; i < Kind::items; ++i) total += a[i] * b[i];
    return total;
}

// *to = the scalar product of a head of a gradient and of a sum, fp32, of which each of `lanes` threads has a piece.
extern "C" __device__ int dot_head_16(int *, u64 to, u64 grad, u64 out, int lane, int lanes, unsigned mask, int kind)
{
    float total = kind == 0   ? dot_piece<Float32>(grad, out)
                  : kind == 1 ? dot_piece<Float16>(grad, out)
                              : dot_piece<Bfloat16>(grad, out);
    total = Group{lane, lanes, mask}.sum(total);
    if (lane == 0) *reinterpret_cast<float *>(to) = total;
    return 0;
}

// Attention of several relations, for a warp's part of rows. Part k of a type has sizes[k] targets, from starts[k] on,
// of relation relations[k]; the three numbers of all `num_relations` parts lie at `parts`, one after the other. Target
// t has edges [ends[t], ends[t + 1]). Arrays keep their first addresses, which take no registers.
struct Parts {
    const float *by_target, *vectors;
    const int *ends, *row;
    const long long *parts;
    float *alpha;
    int num_relations, num_edges;
    unsigned heads;
    float slope;
};

// A thread's pieces of a row, the first of them `piece`, and the threads with others of their head.
template <int V> struct Place {
    unsigned piece, head;
    bool is_used;
    Group group;
    __device__ __forceinline__ Place(const Rows<V> &rows, int lanes)
        : piece(rows.first + rows.lane * V), head(rows.is_used() ? piece / lanes : 0), is_used(rows.is_used()),
          group{(int)(piece % lanes) / V, lanes / V, WARP} {}
};

// Edges of a target: how many, and of thread i the source of edge i; the score of the target.
struct Span {
    int first, num, line, source;
    unsigned target, relation;
    float own;
};

// Targets with edges, line after line, each thread with those of one part. Those of the next line are found meanwhile.
struct Lines {
    const Parts &parts;
    const int first_part, last_part, stop;
    const unsigned lane, head;
    int part, line, first, num, part_ahead, line_ahead, first_ahead, num_ahead;
    unsigned target, target_ahead, found;

    __device__ __forceinline__ Lines(const Parts &given, int begin, int end, int line_of, int last, unsigned thread,
                                     unsigned of_head)
        : parts(given), first_part(begin), last_part(end), stop(begin < end ? last : line_of), lane(thread),
          head(of_head), part_ahead(begin), line_ahead(line_of), found(0)
    {
        find_ahead();
    }
    __device__ __forceinline__ void find_ahead()
    {
        const int k = part_ahead + (int)lane;
        first_ahead = num_ahead = 0, target_ahead = 0;
        if (line_ahead >= stop || k >= last_part || line_ahead >= (int)parts.parts[2 * parts.num_relations + k]) return;
        target_ahead = (unsigned)parts.parts[parts.num_relations + k] + line_ahead;
        first_ahead = min(parts.ends[target_ahead], parts.num_edges);
        num_ahead = min(parts.ends[target_ahead + 1], parts.num_edges) - first_ahead;
    }
    __device__ __forceinline__ Span find_next()
    {
        while (found == 0) {
            if (line_ahead >= stop) return {0, 0, stop, 0, 0, 0, 0.0f};
            part = part_ahead, line = line_ahead, first = first_ahead, num = num_ahead, target = target_ahead;
            found = __ballot_sync(WARP, num > 0);
            part_ahead += LANES;
            if (part_ahead >= last_part) part_ahead = first_part, ++line_ahead;
            find_ahead();
        }
        const int k = __ffs(found) - 1;
        found &= found - 1;
        Span span = {__shfl_sync(WARP, first, k), __shfl_sync(WARP, num, k), line, 0, __shfl_sync(WARP, target, k),
                     (unsigned)parts.parts[part + k], 0.0f};
        span.source = parts.row[span.first + min((int)lane, span.num - 1)];
        span.own = parts.by_target[span.target * parts.heads + head];
        return span;
    }
};

// Difference of scores from which on sums of exponentials take the larger one for their unit.
#define MOST_ABOVE 30.0f

// Adds the attention of a target to `result`, number i at i * THREADS_OF_BLOCK, and writes the weights of its edges:
// their sign bit is set if the score is not above zero. A score is bend(x[source] . vector + by_target[target]). Each
// row is read once, as in attend.cu.
template <class Kind, int V>
__device__ __forceinline__ void attend_span(float *result, const Rows<V> &rows, int turn, const Parts &parts,
                                            const Span &span, const Place<V> &place)
{
    const int items = V * Kind::items;
    const Group group = place.group;
    // Each thread has the score of one of the first edges, and memory those of the others.
    float direction[items], total[items] = {}, best = LEAST, sum = 0.0f, mine = 0.0f;
    if (place.is_used)
        load_fp32<items>(parts.vectors + ((u64)span.relation * rows.pieces + place.piece) * Kind::items, direction);
    const bool keeps = parts.alpha != nullptr && place.is_used;
    float *const alpha = parts.alpha + ((u64)(unsigned)span.first * parts.heads + place.head);
    rows.template read<Kind>(turn, span.num, span.source, parts.row + span.first, [&](int e, const float *value) {
        float product = 0.0f;
#pragma unroll
        for (int i = 0; i < items; ++i) product += value[i] * direction[i];
        product = group.sum(product) + span.own;
        if (e == group.lane) mine = product;
        else if (e >= group.lanes && keeps && group.lane == 0) alpha[(unsigned)e * parts.heads] = product;
        const float score = bend(product, parts.slope);
        // Numbers near the range of fp32 are far away, so that sums are seldom scaled again.
        if (e == 0) {
            best = max(score, LEAST);
        } else if (score > best + MOST_ABOVE) {
            const float shrink = __expf(best - score);
            best = score, sum *= shrink;
#pragma unroll
            for (int i = 0; i < items; ++i) total[i] *= shrink;
        }
        const float share = __expf(score - best);
        sum += share;
#pragma unroll
        for (int i = 0; i < items; ++i) total[i] += share * value[i];
    });
    // If all scores are minus infinity, the result is a NaN, as in the softmax.
    const float scale = sum == 0.0f ? NOT_A_NUMBER : 1.0f / (sum + TINY);
    if (span.num > group.lanes) __syncwarp(WARP);
    for (int e = keeps ? group.lane : span.num; e < span.num; e += group.lanes) {
        float *at = alpha + (unsigned)e * parts.heads;
        const float score = e == group.lane ? mine : *at, weight = __expf(bend(score, parts.slope) - best) * scale;
        *at = score > 0.0f ? weight : -weight;
    }
#pragma unroll
    for (int i = 0; i < items; ++i) result[i * THREADS_OF_BLOCK] += total[i] * scale;
}

template <class Kind, int V>
__device__ __forceinline__ void attend_lines(uint4 *memory, float *sums, u64 x, u64 totals, const Parts &parts,
                                             u64 bias, int first_part, int last_part, unsigned first, int line,
                                             int end, int kept, int type, int lanes, int pieces, int begin, int lane,
                                             bool has_relu)
{
    const int items = V * Kind::items;
    const Rows<V> rows(memory, x, pieces, begin, lane);
    const Place<V> place(rows, lanes);
    Lines lines(parts, first_part, last_part, line, min(end, kept), lane, place.head);
    // Sums of a line take no registers.
    float *const sum = sums + (threadIdx.x / LANES * LANES + lane);
    // Rows of the next target are on their way, and the sources of the one after it.
    Span next = lines.find_next(), far = lines.find_next();
    int turn = 0;
    rows.send_first(turn, next.num, next.source);
    for (; line < end; ++line) {
        float result[items] = {};
        if (bias != 0 && place.is_used)
            load_fp32<items>((const float *)bias + ((u64)(unsigned)type * pieces + place.piece) * Kind::items, result);
#pragma unroll
        for (int i = 0; i < items; ++i) sum[i * THREADS_OF_BLOCK] = result[i];
        while (next.num > 0 && next.line == line) {
            const Span span = next;
            next = far, far = lines.find_next();
            rows.send_first(turn ^ 1, next.num, next.source);
            attend_span<Kind>(sum, rows, turn, parts, span, place);
            turn ^= 1;
        }
#pragma unroll
        for (int i = 0; i < items; ++i) result[i] = sum[i * THREADS_OF_BLOCK];
        const u64 at = (u64)(first + (unsigned)line) * pieces + place.piece;
        if (!place.is_used) continue;
        if (!has_relu) {
            store_fp32<items>(totals + at * (Kind::items * 4), 0, result);
            continue;
        }
        // A NaN stays a NaN.
#pragma unroll
        for (int i = 0; i < items; ++i) result[i] = result[i] < 0.0f ? 0.0f : result[i];
#pragma unroll
        for (int v = 0; v < V; ++v) store_as(Kind(), totals + (at + v) * 16, result + v * Kind::items);
    }
}

// Calls a template for the kind of rows, and for the pieces that a thread has of each: two of a head, if rows have more
// than a warp has threads. As `warps_of_row` of the kernels.
#define FOR_ROWS(CALL)                                                                                               \
    if (lanes > 1 && pieces > LANES) {                                                                               \
        if (kind == 0) CALL(Float32, 2);                                                                             \
        else if (kind == 1) CALL(Float16, 2);                                                                        \
        else CALL(Bfloat16, 2);                                                                                      \
    } else {                                                                                                         \
        if (kind == 0) CALL(Float32, 1);                                                                             \
        else if (kind == 1) CALL(Float16, 1);                                                                        \
        else CALL(Bfloat16, 1);                                                                                      \
    }
#define PIECES_OF_WARP (lanes > 1 && pieces > LANES ? 2 * LANES : LANES)

// Part `of_row` of the sums of rows [line, end) of a type, fp32: of each part in [first_part, last_part), the attention
// of the row's target, added up, and the type's row of `bias` unless this address is zero. The type's rows begin at row
// `first` of `totals`; those from `kept` on have no targets. `alpha` may be zero. Kind 0 is fp32, 1 fp16, 2 bfloat16.
// With `has_relu` sums below zero become zero, and are of kind `kind`.
extern "C" __device__ int attend_lines_16(int *, u64 totals, u64 alpha, u64 x, u64 by_target, u64 vectors, u64 bias,
                                          u64 ends, u64 row, u64 parts_at, int num_relations, int first_part,
                                          int last_part, int first, int line, int end, int kept, int type,
                                          int num_edges, int heads, int lanes, int of_row, int lane, float slope,
                                          int has_relu, int kind)
{
    __shared__ uint4 memory[Rows<2>::ROOM];
    __shared__ float sums[2 * 8 * THREADS_OF_BLOCK];
    const int pieces = heads * lanes;
    const Parts parts = {
        reinterpret_cast<const float *>(by_target), reinterpret_cast<const float *>(vectors),
        reinterpret_cast<const int *>(ends), reinterpret_cast<const int *>(row),
        reinterpret_cast<const long long *>(parts_at), reinterpret_cast<float *>(alpha), num_relations, num_edges,
        (unsigned)heads, slope};
#define ATTEND(Kind, V)                                                                                              \
    attend_lines<Kind, V>(memory, sums, x, totals, parts, bias, first_part, last_part, (unsigned)first, line, end,   \
                          kept, type, lanes, pieces, of_row * PIECES_OF_WARP, lane, has_relu != 0)
    FOR_ROWS(ATTEND)
#undef ATTEND
    return 0;
}

// Edges of a target or of a source. Thread i has the id of edge i: its source, or its target and the number of the
// edge. In each head, thread i has the weight of edge i, or its signs, and the gradient of its score.
struct List {
    int first, num, id, edge;
    float weight, share;
    bool is_only;
};

// Arrays of a backward pass, by their first addresses. Source s has edges [indptr[s], indptr[s + 1]) in the order by
// source, row s of `to_x`, and the vector of its relation.
struct Gradients {
    const float *alpha;
    float *to_edges;
    const int *indptr;
    u64 to_x;
    const float *vector;
    int num_edges;
    unsigned heads;
    float slope;
    __device__ __forceinline__ int count_edges(int source) const
    {
        return min(indptr[source + 1], num_edges) - min(indptr[source], num_edges);
    }
};

// Writes the gradient of a source's row: `pulled` and `along` times its vector.
template <class Kind, int V>
__device__ __forceinline__ void store_row(const Gradients &all, unsigned source, unsigned pieces, unsigned piece,
                                          float *pulled, float along, const float *direction)
{
#pragma unroll
    for (int i = 0; i < V * Kind::items; ++i) pulled[i] += along * direction[i];
#pragma unroll
    for (int v = 0; v < V; ++v)
        store_as(Kind(), all.to_x + ((u64)source * pieces + piece + v) * 16, pulled + v * Kind::items);
}

template <class Kind, int V>
__device__ __forceinline__ void pull_scores(uint4 *memory, u64 x, u64 to_vector, float *to_targets,
                                            const Gradients &all, const uint4 *grad, const int *ends, const int *row,
                                            int target, int end, int shift, int lanes, int pieces, int begin, int lane)
{
    const int items = V * Kind::items;
    const Rows<V> rows(memory, x, pieces, begin, lane);
    const Place<V> place(rows, lanes);
    const Group group = place.group;
    const bool is_used = place.is_used, is_first = is_used && group.lane == 0;
    // Targets have few edges: rows of the next ones are on their way too.
    int ahead = target, bound = min(ends[target], all.num_edges), bound_ahead = min(ends[target + 1], all.num_edges);
    auto find_next = [&]() {
        List list = {bound, bound_ahead - bound, 0, 0, 0.0f, 0.0f, false};
        bound = bound_ahead, ++ahead;
        bound_ahead = min(ends[min(ahead + 1, end)], all.num_edges);
        if (list.num > 0) list.id = row[list.first + min(lane, list.num - 1)];
        return list;
    };
    uint4 own[V];
    auto open = [&](List &list, int turn, int of_target) {
        rows.send_first(turn, list.num, list.id);
        if (list.num == 0) return;
        const unsigned at = (unsigned)(list.first + group.lane) * all.heads + place.head;
        if (group.lane < list.num) list.weight = all.alpha[at];
        list.is_only = lane < list.num && all.count_edges(list.id) == 1;
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (is_used) own[v] = grad[(u64)(unsigned)(of_target + shift) * pieces + place.piece + v];
    };
    List next = find_next(), far = find_next();
    int turn = 0;
    open(next, turn, target);
    float along[items] = {};
    for (; target < end; ++target) {
        List list = next;
        const unsigned first = (unsigned)list.first;
        // Products are counted from the first one, so that a target's only edge has exactly zero.
        float pulled[items], whole[items] = {}, base = 0.0f, total = 0.0f, sum = 0.0f, mine = 0.0f;
#pragma unroll
        for (int v = 0; v < V; ++v) unpack(Kind(), own[v], pulled + v * Kind::items);
        next = far, far = find_next();
        open(next, turn ^ 1, target + 1);
        rows.template read<Kind>(turn, list.num, list.id, row + first, [&](int e, const float *value) {
            float product = 0.0f;
            const float signed_weight = e < group.lanes ? group.get(list.weight, e)
                                                        : all.alpha[(first + e) * all.heads + place.head];
#pragma unroll
            for (int k = 0; k < items; ++k) product += value[k] * pulled[k];
            product = group.sum(product);
            if (e == 0) base = product;
            product -= base;
            total += fabsf(signed_weight) * product;
            // The sign tells that the score was not above zero.
            const float share = fabsf(signed_weight) * (__float_as_uint(signed_weight) >> 31 ? all.slope : 1.0f);
            const float pull = share * product;
#pragma unroll
            for (int k = 0; k < items; ++k) along[k] += pull * value[k], whole[k] += share * value[k];
            if (e == group.lane) mine = product;
            else if (e >= group.lanes && is_first) all.to_edges[(first + e) * all.heads + place.head] = product;
        });
        turn ^= 1;
#pragma unroll
        for (int k = 0; k < items; ++k) along[k] -= total * whole[k];
        if (list.num > group.lanes) __syncwarp(WARP);
        for (int e = is_used ? group.lane : list.num; e < list.num; e += group.lanes) {
            const unsigned at = (first + e) * all.heads + place.head;
            const float weight = e == group.lane ? list.weight : all.alpha[at];
            float share = fabsf(weight) * ((e == group.lane ? mine : all.to_edges[at]) - total);
            if (__float_as_uint(weight) >> 31) share *= all.slope;
            all.to_edges[at] = share, sum += share;
            if (e == group.lane) list.share = share;
        }
        if (list.num > 0) sum = group.sum(sum);
        if (is_first) to_targets[(unsigned)target * all.heads + place.head] = sum;
        // The gradient of a row with one edge is known now.
        unsigned only = __ballot_sync(WARP, list.is_only);
        if (list.num > group.lanes) __syncwarp(WARP);
        for (int from = 0; from < list.num; from += LANES) {
            if (from > 0) {
                list.id = row[first + min(from + lane, list.num - 1)];
                only = __ballot_sync(WARP, from + lane < list.num && all.count_edges(list.id) == 1);
            }
            float direction[items];
            if (only != 0 && is_used) load_fp32<items>(all.vector + place.piece * Kind::items, direction);
            for (; only != 0; only &= only - 1) {
                const int i = __ffs(only) - 1, e = from + i;
                const unsigned at = (first + e) * all.heads + place.head, source = __shfl_sync(WARP, list.id, i);
                const float weight = fabsf(e < group.lanes ? group.get(list.weight, e) : all.alpha[at]);
                const float share = e < group.lanes ? group.get(list.share, e) : all.to_edges[at];
                float result[items];
#pragma unroll
                for (int k = 0; k < items; ++k) result[k] = weight * pulled[k];
                if (is_used) store_row<Kind, V>(all, source, pieces, place.piece, result, share, direction);
            }
        }
    }
    if (is_used) store_fp32<items>(to_vector + place.piece * (Kind::items * 4), 0, along);
}

// Gradients of the scores of the edges of targets [target, end) of one relation before `bend`, in `to_edges`, their
// sums by target, and in row `to_vector` the sum of the edges' rows times these, fp32; and the gradients of rows with
// one edge. Target t has edges [ends[t], ends[t + 1]) and row t + shift of `grad`. Addresses are first ones, but of
// `to_vector`, and of `vector`, which is the relation's; `alpha` has the weights of `attend_lines_16`, which has
// `of_row`.
extern "C" __device__ int pull_scores_16(int *, u64 to_vector, u64 to_edges, u64 to_targets, u64 to_x, u64 alpha, u64 x,
                                         u64 grad, u64 vector, u64 ends, u64 row, u64 indptr, int num_edges, int target,
                                         int end, int shift, int heads, int lanes, int of_row, int lane, float slope,
                                         int kind)
{
    __shared__ uint4 memory[Rows<2>::ROOM];
    const int pieces = heads * lanes;
    const Gradients all = {reinterpret_cast<const float *>(alpha), reinterpret_cast<float *>(to_edges),
                           reinterpret_cast<const int *>(indptr), to_x, reinterpret_cast<const float *>(vector),
                           num_edges, (unsigned)heads, slope};
#define PULL(Kind, V)                                                                                                \
    pull_scores<Kind, V>(memory, x, to_vector, reinterpret_cast<float *>(to_targets), all,                           \
                         reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(ends),                 \
                         reinterpret_cast<const int *>(row), target, end, shift, lanes, pieces,                      \
                         of_row * PIECES_OF_WARP, lane)
    FOR_ROWS(PULL)
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void pull_row(u64 to, bool to_fp32, const uint4 *grad, const int *target, const int *edge,
                                         const float *alpha, const float *shares, const float *vector, int first,
                                         int last, int shift, unsigned heads, unsigned pieces)
{
    const int EDGES = 2;
    float result[Kind::items] = {}, direction[Kind::items], along = 0.0f;
    for (int i = first; i < last; i += EDGES) {
        uint4 raw[EDGES];
        float weight[EDGES];
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            const int place = min(i + u, last - 1);
            const unsigned at = (unsigned)edge[place] * heads;
            raw[u] = grad[(u64)((unsigned)target[place] + (unsigned)shift) * pieces];
            weight[u] = i + u < last ? fabsf(alpha[at]) : 0.0f;
            along += i + u < last ? shares[at] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < EDGES; ++u) {
            float value[Kind::items];
            unpack(Kind(), raw[u], value);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) result[k] += weight[u] * value[k];
        }
    }
    load_fp32<Kind::items>(vector, direction);
#pragma unroll
    for (int k = 0; k < Kind::items; ++k) result[k] += along * direction[k];
    if constexpr (Kind::items == 4) {
        store_fp32<4>(to, 0, result);
    } else {
        if (to_fp32) store_fp32<8>(to, 0, result);
        else store(Kind(), to, 0, result);
    }
}

// Gradient of a piece of a source's row from its edges [first, last) in the order by source, and from the gradients
// `shares` of their scores. `to` and `vector` are addresses of the piece; `grad` of the piece of the first row, which
// row target[i] + shift follows; `alpha` and `shares` are addresses of the head's first number. Kind 0 is fp32, 1 fp16,
// 2 bfloat16; the result is of kind `to_kind`: the kind of rows, or fp32.
extern "C" __device__ int pull_row_16(int *, u64 to, int to_kind, u64 grad, u64 target, u64 edge, u64 alpha,
                                      u64 shares, u64 vector, long long first, long long last, long long shift,
                                      int heads, int pieces, int kind)
{
#define PULL(Kind)                                                                                                   \
    pull_row<Kind>(to, to_kind == 0, reinterpret_cast<const uint4 *>(grad), reinterpret_cast<const int *>(target),   \
                   reinterpret_cast<const int *>(edge), reinterpret_cast<const float *>(alpha),                      \
                   reinterpret_cast<const float *>(shares), reinterpret_cast<const float *>(vector), (int)first,     \
                   (int)last, (int)shift, (unsigned)heads, (unsigned)pieces)
    if (kind == 0) PULL(Float32);
    else if (kind == 1) PULL(Float16);
    else PULL(Bfloat16);
#undef PULL
    return 0;
}

template <class Kind, int V>
__device__ __forceinline__ void pull_rows(uint4 *memory, u64 grad, const Gradients &all, const int *target,
                                          const int *edge, int source, int end, int most, int lanes, int pieces,
                                          int begin, int lane)
{
    const int items = V * Kind::items;
    const Rows<V> rows(memory, grad, pieces, begin, lane);
    const Place<V> place(rows, lanes);
    const Group group = place.group;
    // Each thread finds the edges of a source, those of the next sources meanwhile.
    int sources = source, sources_ahead = source, first = 0, num = 0, first_ahead = 0, num_ahead = 0;
    unsigned found = 0;
    auto find_ahead = [&]() {
        const int own = sources_ahead + lane;
        first_ahead = 0, num_ahead = 1;
        if (own < end) first_ahead = min(all.indptr[own], all.num_edges), num_ahead = all.count_edges(own);
    };
    find_ahead();
    // Sources with one edge are done, and slices of those with many are added up elsewhere.
    auto find_next = [&](unsigned &of_source) {
        List list = {0, -1, 0, 0, 0.0f, 0.0f, false};
        while (found == 0) {
            if (sources_ahead >= end) return list;
            sources = sources_ahead, first = first_ahead, num = num_ahead;
            found = __ballot_sync(WARP, num != 1 && num <= most);
            sources_ahead += LANES;
            find_ahead();
        }
        const int i = __ffs(found) - 1;
        found &= found - 1;
        of_source = (unsigned)(sources + i), list.first = __shfl_sync(WARP, first, i),
        list.num = __shfl_sync(WARP, num, i);
        if (list.num > 0) {
            const int at = list.first + min(lane, list.num - 1);
            list.id = target[at], list.edge = edge[at];
        }
        return list;
    };
    auto weigh = [&](List &list, int e) {
        const unsigned number = __shfl_sync(WARP, list.edge, (e & (LANES - 1)) + group.lane);
        const unsigned at = number * all.heads + place.head;
        list.weight = list.share = 0.0f;
        if (e + group.lane < list.num) list.weight = all.alpha[at], list.share = all.to_edges[at];
    };
    unsigned of_next = 0, of_far = 0;
    int turn = 0;
    List next = find_next(of_next), far = find_next(of_far);
    rows.send_first(turn, next.num, next.id);
    if (next.num > 0) weigh(next, 0);
    float direction[items];
    if (place.is_used) load_fp32<items>(all.vector + place.piece * Kind::items, direction);
    while (next.num >= 0) {
        List list = next;
        const unsigned of_list = of_next;
        next = far, of_next = of_far, far = find_next(of_far);
        rows.send_first(turn ^ 1, next.num, next.id);
        if (next.num > 0) weigh(next, 0);
        float result[items] = {}, share = list.share;
        rows.template read<Kind>(turn, list.num, list.id, target + list.first, [&](int e, const float *value) {
            const int at = e & (group.lanes - 1);
            if (e > 0 && at == 0) {
                if ((e & (LANES - 1)) == 0) list.edge = edge[list.first + min(e + lane, list.num - 1)];
                weigh(list, e);
                share += list.share;
            }
            const float weight = fabsf(group.get(list.weight, at));
#pragma unroll
            for (int k = 0; k < items; ++k) result[k] += weight * value[k];
        });
        turn ^= 1;
        share = group.sum(share);
        if (place.is_used) store_row<Kind, V>(all, of_list, pieces, place.piece, result, share, direction);
    }
}

// Gradients of part `of_row` of the rows of sources [source, end) of one relation, as of `pull_row_16`; but for rows of
// one edge, which `pull_scores_16` has written, and of more than `most`. Addresses are first ones, but of `grad`, which
// is of the row that target 0 of the relation has or would have, and of the relation's `vector`.
extern "C" __device__ int pull_rows_16(int *, u64 to_x, u64 grad, u64 indptr, u64 target, u64 edge, u64 alpha,
                                       u64 shares, u64 vector, int num_edges, int source, int end, int most, int heads,
                                       int lanes, int of_row, int lane, int kind)
{
    __shared__ uint4 memory[Rows<2>::ROOM];
    const int pieces = heads * lanes;
    const Gradients all = {reinterpret_cast<const float *>(alpha), reinterpret_cast<float *>(shares),
                           reinterpret_cast<const int *>(indptr), to_x, reinterpret_cast<const float *>(vector),
                           num_edges, (unsigned)heads, 1.0f};
#define PULL(Kind, V)                                                                                                \
    pull_rows<Kind, V>(memory, grad, all, reinterpret_cast<const int *>(target), reinterpret_cast<const int *>(edge),\
                       source, end, most, lanes, pieces, of_row * PIECES_OF_WARP, lane)
    FOR_ROWS(PULL)
#undef PULL
    return 0;
}

template <class Kind>
__device__ __forceinline__ void join_rows(u64 to, u64 total_at, u64 grad, const uint4 *out, int first, int last,
                                          int kept, unsigned pieces)
{
    const int ROWS = 2;
    float total[Kind::items] = {};
    for (int i = first; i < last; i += ROWS) {
        float value[ROWS][Kind::items];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const u64 at = (u64)min(i + u, last - 1) * pieces;
            if (out == nullptr) {
                load_fp32<Kind::items>(reinterpret_cast<const float *>(grad) + at * Kind::items, value[u]);
                continue;
            }
            float above[Kind::items];
            unpack(Kind(), reinterpret_cast<const uint4 *>(grad)[at], value[u]);
            unpack(Kind(), out[at], above);
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) value[u][k] = above[k] <= 0.0f ? 0.0f : value[u][k];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (i + u >= last) break;
#pragma unroll
            for (int k = 0; k < Kind::items; ++k) total[k] += value[u][k];
            if (i + u < kept) store_as(Kind(), to + (u64)(i + u) * pieces * 16, value[u]);
        }
    }
    store_fp32<Kind::items>(total_at, 0, total);
}

// Sum of a piece of the rows [first, last) of a gradient, fp32 at `total`. Rows below `kept` are written to `to`, of
// kind `kind`. The gradient is fp32 if `out` is zero; otherwise it is of kind `kind` and of the results `out` of a
// ReLU. Addresses are of the piece of row 0.
extern "C" __device__ int join_rows_16(int *, u64 to, u64 total, u64 grad, u64 out, long long first, long long last,
                                       long long kept, int pieces, int kind)
{
#define JOIN(Kind)                                                                                                   \
    join_rows<Kind>(to, total, grad, reinterpret_cast<const uint4 *>(out), (int)first, (int)last, (int)kept,         \
                    (unsigned)pieces)
    if (kind == 0) JOIN(Float32);
    else if (kind == 1) JOIN(Float16);
    else JOIN(Bfloat16);
#undef JOIN
    return 0;
}

// Four numbers of a sum of fp32 rows: those of `bias`, unless it is zero, and of row `row` of each part [first, last)
// that has it. Part k begins at row starts[k] of `out`, whose address is that of the piece of row 0.
extern "C" __device__ int add_parts_4(int *, u64 to, u64 out, u64 bias, u64 starts, u64 sizes, long long first,
                                      long long last, long long row, int pieces)
{
    float total[4] = {};
    if (bias != 0) load_fp32<4>(reinterpret_cast<const float *>(bias), total);
    for (long long k = first; k < last; ++k) {
        if (row >= reinterpret_cast<const long long *>(sizes)[k]) continue;
        float value[4];
        const u64 at = (u64)(reinterpret_cast<const long long *>(starts)[k] + row) * (unsigned)pieces * 4;
        load_fp32<4>(reinterpret_cast<const float *>(out) + at, value);
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += value[i];
    }
    store_fp32<4>(to, 0, total);
    return 0;
}
