// The avx2 version of the float kernels. Only C headers here: an inline function of the C++ library compiled
// for this tier could be the copy that the linker keeps for all.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"

namespace coldstream {

namespace {

#include "ops/vec16_avx2.inl"

// Accumulators of a product: TILE_ROWS × TILE_VECTORS vectors of two registers.
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1, DELTA_VECTORS = 1, STEP_VECTORS = 2;

#include "ops/float_kernels.inl"
#include "ops/attention_kernels.inl"
#include "ops/delta_net_kernels.inl"
#include "ops/router_kernels.inl"

}  // namespace

const float_kernels float_kernels_avx2 = {
    .add = add,
    .swiglu = swiglu,
    .rms_norm = rms_norm,
    .gated_rms_norm = gated_rms_norm,
    .l2_norm = l2_norm,
    .combine = combine,
    .rope = rope,
    .to_float16 = convert_to_float16,
    .attend_f16 = attend<float16>,
    .attend_f32 = attend<float>,
    .attend_merge = attend_merge,
    .attend_finish = attend_finish,
    .convolve = convolve,
    .delta_gates = delta_gates,
    .delta_advance = delta_advance,
    .delta_columns = 16 * DELTA_VECTORS,
    .delta_step = delta_step,
    .step_columns = 16 * STEP_VECTORS,
    .product_f32 = product<float>,
    .product_f16 = product<float16>,
    .product_bf16 = product<bfloat16>,
    .softmax_topk = softmax_topk,
};

}  // namespace coldstream

#endif
