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
#include "ops/pair_tier.inl"

}  // namespace

const FloatKernels float_kernels_neon = {
#include "ops/float_table.inl"
};

}  // namespace coldstream

#endif
