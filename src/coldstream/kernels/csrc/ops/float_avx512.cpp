// The avx512 version of the float kernels. Only C headers here: an inline function of the C++ library
// compiled for this tier could be the copy that the linker keeps for all.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

namespace {

#include "ops/vec16_avx512.inl"
#include "ops/integer_lanes_avx512.inl"

// Accumulators of a product: tile_rows × tile_vectors registers.
constexpr int tile_rows = 8, tile_vectors = 2, delta_vectors = 2, delta_chains = 4, step_vectors = 8;

#include "ops/float_tier.inl"
#include "ops/byte_words_avx512.inl"
#include "ops/byte_operands_avx512.inl"

// For attention over integers.
using OnePlane = WordOperands;
using TwoPlanes = ByteOperands;

}  // namespace

const FloatKernels float_kernels_avx512 = {
#include "ops/float_table.inl"
};

}  // namespace coldstream

#endif
