// Attention over integers with the tiles of AMX; everything else of the amx tier is that of avx512. Only C
// headers here, as in float_avx512.cpp.
#if defined(__AMX_INT8__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"

namespace coldstream {

namespace {

#include "ops/vec16_avx512.inl"
#include "ops/integer_lanes_avx512.inl"

// Accumulators of a product: tile_rows × tile_vectors registers.
constexpr int tile_rows = 8, tile_vectors = 2;

#include "ops/float_kernels.inl"
#include "ops/attention_kernels.inl"
#include "ops/integer_attention_kernels.inl"
#include "ops/byte_words_avx512.inl"
#include "ops/byte_operands_amx.inl"

using OnePlane = TileOperands<1>;
using TwoPlanes = TileOperands<2>;

}  // namespace

const CacheKernels integer_cache_kernels_amx[num_integer_cache_types] = {
#include "ops/integer_cache_table.inl"
};

}  // namespace coldstream

#endif
