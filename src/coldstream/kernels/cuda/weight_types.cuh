// Sets of types, and code for the one of them that a matrix has.
#pragma once

#include "cuda/weight_traits.cuh"

namespace coldstream {

// The types that a kernel is compiled for, a bit for each: code for more types would displace a layer's other
// kernels from the instruction caches (docs/notes/offloaded-experts.md).
using Types = uint64_t;
constexpr Types type_bit(int type) { return Types(1) << type; }
constexpr Types float_types = type_bit(f32) | type_bit(f16) | type_bit(bf16);

template <class... Weights>
constexpr Types small_types_of(WeightList<Weights...>) {
  return ((Weights::is_super ? 0 : type_bit(Weights::type)) | ...);
}
constexpr Types block_types = small_types_of(AllWeights{});  // of blocks of 32 or 64

// Whether `type`, one of `types`, is `which`.
template <Types types, int which>
__device__ __forceinline__ bool is_type(int type) {
  return (types >> which & 1) && (types == type_bit(which) || type == which);
}

template <Types types>
__device__ __forceinline__ bool is_float(int type) {
  if ((types & float_types) == 0 || (types & ~float_types) == 0) return (types & float_types) != 0;
  return type == f32 || type == f16 || type == bf16;
}

// Whether a type has blocks of 32 or 64, which need an activation scale per 32 inputs.
template <Types types>
__device__ __forceinline__ bool is_block_type(int type) {
  if ((types & block_types) == 0 || (types & ~block_types) == 0) return (types & block_types) != 0;
  return (block_types >> type & 1) != 0;
}

template <Types types, class Weights, class Use>
__device__ __forceinline__ bool use_if(int type, Use& use) {
  if constexpr ((types >> Weights::type & 1) != 0) {
    if (is_type<types, Weights::type>(type)) {
      use(Weights{});
      return true;
    }
  }
  return false;
}

template <Types types, class Use, class... Weights>
__device__ __forceinline__ void use_one(int type, Use& use, WeightList<Weights...>) {
  (use_if<types, Weights>(type, use) || ...);
}

// Calls use(traits) with those of `type`, if it is a quantised one of `types`.
template <Types types, class Use>
__device__ __forceinline__ void with_weights(int type, Use&& use) {
  use_one<types>(type, use, AllWeights{});
}

}  // namespace coldstream
