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

// Accumulators of a product: TILE_ROWS × TILE_VECTORS registers.
constexpr int TILE_ROWS = 8, TILE_VECTORS = 2;

#include "ops/float_kernels.inl"
#include "ops/attention_kernels.inl"
#include "ops/integer_attention_kernels.inl"
#include "ops/byte_words_avx512.inl"
#include "ops/byte_operands_amx.inl"

using one_plane = tile_operands<1>;
using two_planes = tile_operands<2>;

}  // namespace

const cache_kernels integer_cache_kernels_amx[NUM_INTEGER_CACHE_TYPES] = {
#include "ops/integer_cache_table.inl"
};

}  // namespace coldstream

#endif
