// The avx2 version of the float kernels. Only C headers here: an inline function of the C++ library compiled
// for this tier could be the copy that the linker keeps for all.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

#include "ops/vec16_avx2.inl"
#include "ops/integer_lanes_avx2.inl"

// Accumulators of a product: tile_rows × tile_vectors vectors of two registers.
constexpr int tile_rows = 4, tile_vectors = 1, delta_vectors = 1, delta_chains = 2, step_vectors = 2;

#include "ops/float_tier.inl"
#include "ops/row_operands_avx2.inl"

// For attention over integers.
using OnePlane = RowOperands<1>;
using TwoPlanes = RowOperands<2>;

}  // namespace

const FloatKernels float_kernels_avx2 = {
#include "ops/float_table.inl"
};

}  // namespace coldstream

#endif
