// Copies of table rows in 16-byte pieces, which Numba cannot express.
//
// Called from pyg_direct/kernels/gather.py. Functions follow Numba's calling convention: the first parameter is
// the place for a result, which is not used, and the return value 0 means success.

// One row of `pieces` times 16 bytes, shared by the lanes 0 .. lanes-1 of a group; source 0 stands for zeros. Four
// pieces of a lane are in flight before the first is stored: a row is then read in one go, which DRAM serves best.
extern "C" __device__ int copy_row_16(int *, unsigned long long target, unsigned long long source, int pieces,
                                      int lane, int lanes)
{
    const uint4 *from = reinterpret_cast<const uint4 *>(source);
    uint4 *to = reinterpret_cast<uint4 *>(target);
    for (int piece = lane; piece < pieces; piece += 4 * lanes) {
        uint4 value[4] = {};
        if (from != nullptr) {
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                if (piece + u * lanes < pieces) value[u] = from[piece + u * lanes];
            }
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (piece + u * lanes < pieces) to[piece + u * lanes] = value[u];
        }
    }
    return 0;
}
