// The rows that a block advances a state over, one after the other: those of a chain, or those from the first
// row of a draft tree to one of its leaves.
//
// The states after a tree's rows are not kept: a block starts from the committed state and walks to its leaf,
// and several blocks may compute the same rows. A row is owned by the leaf that is reached from it by always
// taking the first child; the block of that leaf writes the row's output.
#pragma once

#include "gated_delta_net/layer.cuh"

namespace coldstream {

constexpr int max_tree_rows = 64;

struct Route {
  int first;        // a chain's first row
  int count;        // rows
  int first_owned;  // number of the first row whose output this block writes; it writes all from there on
  const int* path;  // a tree's rows, in shared memory; null: a chain

  __device__ int row(int i) const { return path ? path[i] : first + i; }
};

// The number of rows of the sequence that begins with row `first`; 0 if that row is not the first of its
// sequence. By a whole warp.
__device__ __forceinline__ int count_rows(const DeltaRows& rows, int first) {
  if (!rows.is_first(first)) return 0;
  const int segment = rows.segments[first];
  for (int count = 0;; count += warp_size) {
    const int row = first + count + threadIdx.x % warp_size;
    const uint32_t others = __ballot_sync(all_lanes, row >= rows.num_rows || rows.segments[row] != segment);
    if (others) return count + __ffs(others) - 1;
  }
}

// A tree's parents as numbers within the tree, those of two rows in each lane.
struct TreeParents {
  int start;   // the tree's first row
  int own[2];  // of rows lane and lane + 32; −1: the committed state; −2: no row

  __device__ TreeParents(const DeltaRows& rows, int row) : start(row) {
    const int lane = threadIdx.x % warp_size, segment = rows.segments[row];
    for (uint32_t others = 0; !others;) {
      const int before = start - 1 - lane;
      others = __ballot_sync(all_lanes, before < 0 || rows.segments[before] != segment);
      start -= others ? __ffs(others) - 1 : warp_size;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = start + half * warp_size + lane;
      own[half] = -2;
      if (at < rows.num_rows && rows.segments[at] == segment) own[half] = max(rows.parents[at] - start, -1);
    }
  }

  __device__ int parent_of(int number) const {
    const int low = __shfl_sync(all_lanes, own[0], number % warp_size);
    const int high = __shfl_sync(all_lanes, own[1], number % warp_size);
    return number < warp_size ? low : high;
  }

  // The children of row `number`, a bit each.
  __device__ uint64_t children_of(int number) const {
    return __ballot_sync(all_lanes, own[0] == number) | uint64_t{__ballot_sync(all_lanes, own[1] == number)}
                                                            << warp_size;
  }
};

// The route to a row of a tree; it has no rows if that row is not a leaf. Every warp of the block computes
// the same. `path`: [max_tree_rows] in shared memory.
__device__ __forceinline__ Route route_to_leaf(const DeltaRows& rows, int leaf, int* path) {
  const TreeParents parents(rows, leaf);
  Route route{0, 0, 0, path};
  const int last = leaf - parents.start;
  if (parents.children_of(last)) return route;
  for (int at = last; at >= 0; at = parents.parent_of(at)) route.count++;
  bool is_owned = true;
  int i = route.count - 1;
  route.first_owned = i;
  for (int at = last; at >= 0; i--) {
    if (threadIdx.x == 0) path[i] = parents.start + at;
    const int parent = parents.parent_of(at);
    if (parent < 0) break;
    is_owned = is_owned && __ffsll(parents.children_of(parent)) - 1 == at;
    if (is_owned) route.first_owned = i - 1;
    at = parent;
  }
  __syncthreads();
  return route;
}

}  // namespace coldstream
