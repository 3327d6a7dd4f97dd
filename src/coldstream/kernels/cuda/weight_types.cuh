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

template <class Weights>
constexpr Types interleaving_type() {
  if constexpr (!Weights::is_super)
    return Weights::interleaves_x ? type_bit(Weights::type) : 0;
  else
    return 0;
}

// Copies of a type's grid in a kernel that has `room` bytes for them.
template <class Weights>
constexpr int grid_copies(int room) {
  if (!Weights::repeats_grid || 8 * 4 * Weights::grid_entries > room) return 1;
  return 16 * 4 * Weights::grid_entries <= room ? 16 : 8;
}
// Words of the grids of the types in front of type `type`.
template <Types types, int room, class... Weights>
constexpr int grid_words(int type, WeightList<Weights...>) {
  return ((Weights::type < type && (types >> Weights::type & 1)
               ? Weights::grid_entries * grid_copies<Weights>(room)
               : 0) +
          ... + 0);
}
// Shared memory for the grids of a kernel's types, a multiple of 16.
template <Types types, int room>
constexpr int grid_bytes = 4 * grid_words<types, room>(64, AllWeights{});

// The grid of one of the types.
template <Types types, class Weights, int room>
__device__ __forceinline__ SharedGrid<grid_copies<Weights>(room)> grid_of(const uint32_t* grids) {
  return SharedGrid<grid_copies<Weights>(room)>(grids + grid_words<types, room>(Weights::type, AllWeights{}));
}

template <class... Weights>
constexpr Types interleaving_types_of(WeightList<Weights...>) {
  return (interleaving_type<Weights>() | ...);
}
// Whether a kernel keeps rows for blocks of 32 in the order of `interleave`: if all its types take them so.
template <Types types>
constexpr bool interleaves_x = (types & block_types & ~interleaving_types_of(AllWeights{})) == 0;

template <class... Weights>
constexpr Types column_types_of(WeightList<Weights...>) {
  return ((Weights::takes_columns ? type_bit(Weights::type) : 0) | ...);
}
// Whether a kernel keeps the codes of a row for blocks of 32 by columns too: if one of its types takes them.
template <Types types>
constexpr bool keeps_columns = (types & column_types_of(AllWeights{})) != 0;

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

template <int copies>
__device__ __forceinline__ void keep_entry(uint32_t* grid, int at, uint32_t entry) {
  if constexpr (copies == 1) {
    grid[at] = entry;
  } else {
    uint4* fours = reinterpret_cast<uint4*>(grid + at * copies);
    // Neighbouring threads begin in different banks, of which an entry has `copies` of 32.
#pragma unroll
    for (int i = 0; i < copies / 4; i++)
      fours[(i + at / (32 / copies)) % (copies / 4)] = {entry, entry, entry, entry};
  }
}

template <Types types, class Weights, int room>
__device__ __forceinline__ void keep_grid(uint32_t* grids) {
  if constexpr ((types >> Weights::type & 1) != 0 && Weights::grid_entries > 0) {
    constexpr int batch = 4;  // whose loads are under way together
    uint32_t* grid = grids + grid_words<types, room>(Weights::type, AllWeights{});
    for (int first = threadIdx.x; first < Weights::grid_entries; first += batch * blockDim.x) {
      uint32_t entries[batch];
#pragma unroll
      for (int i = 0; i < batch; i++)
        entries[i] = Weights::grid_entry(min(first + i * int(blockDim.x), Weights::grid_entries - 1));
#pragma unroll
      for (int i = 0; i < batch; i++) {
        const int at = first + i * blockDim.x;
        if (at < Weights::grid_entries) keep_entry<grid_copies<Weights>(room)>(grid, at, entries[i]);
      }
    }
  }
}

template <Types types, int room, class... Weights>
__device__ __forceinline__ void keep_each_grid(uint32_t* grids, WeightList<Weights...>) {
  (keep_grid<types, Weights, room>(grids), ...);
}

// Writes the grids of a kernel's types into shared memory by the whole block, without a barrier.
template <Types types, int room>
__device__ __forceinline__ void keep_grids(uint32_t* grids) {
  keep_each_grid<types, room>(grids, AllWeights{});
}

}  // namespace coldstream
