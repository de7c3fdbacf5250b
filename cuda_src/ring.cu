// Copies of table rows through a ring in shared memory, which Numba cannot express: what is on its way takes no
// registers, so that a block of one warp finds a place beside those of a model.
//
// Called from pyg_direct/kernels/ring.py. Functions follow Numba's calling convention: the first parameter is the place
// for a result, which is not used, and the return value 0 means success. A row at address 0 stands for zeros.

typedef unsigned int u32;
typedef unsigned long long u64;

// The same number as in kernels/ring.py; a lane copies 16 bytes of each row of a part.
constexpr int ROWS = 32;
constexpr int LANES = 32;

__shared__ uint4 ring[2][ROWS][LANES];

// What lies at an address, which is known to be one of global memory: a generic access takes longer.
template <typename T> __device__ T *at(u64 address)
{
    return static_cast<T *>(__cvta_global_to_generic(address));
}

__device__ void begin_piece(uint4 *place, u64 from)
{
#if __CUDA_ARCH__ >= 800
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(place));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    *place = *at<const uint4>(from);
#endif
}

// Begin to read `bytes` (at most 512, whole pieces of 16) of `count` rows into a half of the ring. Each lane gives the
// address of one row.
extern "C" __device__ int begin_rows(int *, int half, u64 row, int count, int bytes, int lane)
{
    const bool is_used = 16 * lane < bytes;
#pragma unroll 8
    for (int u = 0; u < count; ++u) {
        const u64 from = __shfl_sync(~0u, row, u);
        if (!is_used) continue;
        if (from) begin_piece(&ring[half][u][lane], from + 16 * lane);
        else ring[half][u][lane] = make_uint4(0, 0, 0, 0);
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    return 0;
}

// Write what was read into a half of the ring to `target` and every `step` bytes from there; `is_more`: more was begun
// since. A lane writes what it has read itself, and waits for that alone.
extern "C" __device__ int finish_rows(int *, int half, int is_more, u64 target, long long step, int count, int bytes,
                                      int lane)
{
#if __CUDA_ARCH__ >= 800
    if (is_more) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    if (16 * lane >= bytes) return 0;
#pragma unroll 8
    for (int u = 0; u < count; ++u) *at<uint4>(target + u * step + 16 * lane) = ring[half][u][lane];
    return 0;
}
