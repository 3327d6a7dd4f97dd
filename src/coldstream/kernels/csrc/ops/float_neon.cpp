// The NEON version of the float kernels, also that of the dotprod tier. Only C headers here: an inline
// function of the C++ library compiled for this tier could be the copy that the linker keeps for all.
#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"
#include "shuffles_neon.h"

namespace coldstream {

namespace {

#include "ops/vec16_neon.inl"
#include "ops/integer_lanes_neon.inl"

// Accumulators of a product: tile_rows × tile_vectors vectors of four registers.
constexpr int tile_rows = 4, tile_vectors = 1, delta_vectors = 1, delta_chains = 2, step_vectors = 2;

#include "ops/float_kernels.inl"
#include "ops/attention_kernels.inl"
#include "ops/integer_attention_kernels.inl"
#include "ops/delta_net_kernels.inl"
#include "ops/router_kernels.inl"

// For attention over integers.
using OnePlane = PairOperands<1>;
using TwoPlanes = PairOperands<2>;

}  // namespace

const FloatKernels float_kernels_neon = {
#include "ops/float_table.inl"
};

}  // namespace coldstream

#endif
