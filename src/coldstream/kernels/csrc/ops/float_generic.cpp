// The generic version of the float kernels. Only C headers here: an inline function of the C++ library
// compiled for this tier could be the copy that the linker keeps for all.
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"

namespace coldstream {

namespace {

#include "ops/vec16_generic.inl"
#include "ops/integer_lanes_generic.inl"
#include "ops/pair_tier.inl"

}  // namespace

const FloatKernels float_kernels_generic = {
#include "ops/float_table.inl"
};

}  // namespace coldstream
