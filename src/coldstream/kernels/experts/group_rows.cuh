// The pairs (token, rank) of a few tokens grouped by expert, by every block for itself: with some hundred
// pairs this takes less time than another launch, and than reading lists that another kernel wrote.
//
// A group is split into items of at most `item_rows` pairs. Items are numbered by the first pair of their
// group; the shared expert's come before all others, and have all tokens in order.
#pragma once

#include "experts/gemv.cuh"

namespace coldstream {

constexpr int no_pair = 0xffff;
constexpr int first_bits =
    12;  // of an entry in the list of items; the bits above are its number of pairs minus 1

// Which experts the tokens have, each at most once.
struct Chosen {
  const int* ids;            // [tokens, ranks], each 0 … num_experts − 1
  const int64_t* addresses;  // by expert; the pairs of one with 0 are in no group
  int num_tokens;            // up to 32
  int num_ranks;
  int num_experts;

  __device__ __forceinline__ int num_pairs() const { return num_tokens * num_ranks; }
  __device__ __forceinline__ int64_t address(int pair) const { return addresses[ids[pair]]; }
};

// Where things lie in a block's dynamic shared memory, in bytes.
struct GroupedPlan {
  int item_rows;
  int has_shared;
  int stage_bytes;
  int stages;
  int rows_at;          // of activations
  int accumulators_at;  // [warps, item_rows, lanes]; only where a row has more than one pass
  int sums_at;          // [warps, 2, item_rows, unit_rows]
  int unit_rows;        // the most of a unit
  int members_at;       // 16 bits a pair
  int items_at;         // 16 bits an item
};

// The lists of a block. The memory of `scratch` is free again after `group_rows`.
struct Groups {
  uint16_t* members;  // pairs, group by group, and by token in a group
  uint16_t* items;
};

struct Scratch {
  uint32_t* owner;   // [num_experts], the first pair of an expert
  uint32_t* tokens;  // by a group's first pair: a bit for each token
  uint32_t* leader;  // by pair: the first pair of its group
  uint32_t* start;   // by a group's first pair: its place in the list of members

  __device__ __forceinline__ Scratch(uint8_t* memory, const Chosen& chosen)
      : owner(reinterpret_cast<uint32_t*>(memory)),
        tokens(owner + chosen.num_experts),
        leader(tokens + chosen.num_pairs()),
        start(leader + chosen.num_pairs()) {}
};

// Needs nothing of an earlier kernel.
__device__ __forceinline__ void clear_scratch(const Scratch& scratch, const Chosen& chosen) {
#pragma unroll 1
  for (int e = threadIdx.x; e < chosen.num_experts; e += expert_threads) scratch.owner[e] = ~0u;
#pragma unroll 1
  for (int pair = threadIdx.x; pair < chosen.num_pairs(); pair += expert_threads) scratch.tokens[pair] = 0;
  __syncthreads();
}

__device__ __forceinline__ void find_leaders(const Scratch& scratch, const Chosen& chosen,
                                             const int64_t* next_addresses) {
#pragma unroll 1
  for (int pair = threadIdx.x; pair < chosen.num_pairs(); pair += expert_threads) {
    if (next_addresses) bring_near(next_addresses + chosen.ids[pair]);
    if (chosen.address(pair) != 0) atomicMin(scratch.owner + chosen.ids[pair], uint32_t(pair));
  }
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < chosen.num_pairs(); pair += expert_threads) {
    scratch.leader[pair] = no_pair;
    if (chosen.address(pair) == 0) continue;
    const int leader = scratch.owner[chosen.ids[pair]];
    scratch.leader[pair] = leader;
    atomicOr(scratch.tokens + leader, 1u << pair / chosen.num_ranks);
  }
  __syncthreads();
}

// The sum over the block's threads up to this one, in two halves of 16 bits; `total` gets that over all. With
// barriers.
__device__ __forceinline__ int sum_to_here(int own, int& total) {
  __shared__ int ends[expert_warps];
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
#pragma unroll
  for (int step = 1; step < warp_size; step *= 2) {
    const int other = __shfl_up_sync(all_lanes, own, step);
    if (lane >= step) own += other;
  }
  if (lane == warp_size - 1) ends[warp] = own;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < expert_warps; w++) {
    if (w < warp) own += ends[w];
    total += ends[w];
  }
  __syncthreads();
  return own;
}

// Writes the lists by the whole block, after `clear_scratch`, and brings another table of addresses near, if
// there is one. Returns the number of items.
__device__ __forceinline__ int group_rows(const Scratch& scratch, const Chosen& chosen, const Groups& groups,
                                          int item_rows, const int64_t* next_addresses) {
  find_leaders(scratch, chosen, next_addresses);
  const int num_pairs = chosen.num_pairs();
  int before = 0;  // items and members, in this order from the top
#pragma unroll 1
  for (int first = 0; first < num_pairs; first += expert_threads) {
    const int pair = first + threadIdx.x, count = pair < num_pairs ? __popc(scratch.tokens[pair]) : 0;
    const int own = (count + item_rows - 1) / item_rows << 16 | count;
    int total;
    const int start = before + sum_to_here(own, total) - own, at = start & 0xffff;
    before += total;
    if (count == 0) continue;
    scratch.start[pair] = at;
#pragma unroll 1
    for (int i = 0; i * item_rows < count; i++)
      groups.items[(start >> 16) + i] =
          uint16_t(at + i * item_rows | (min(item_rows, count - i * item_rows) - 1) << first_bits);
  }
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < num_pairs; pair += expert_threads) {
    const uint32_t leader = scratch.leader[pair];
    if (leader == no_pair) continue;
    const uint32_t earlier = scratch.tokens[leader] & ((1u << pair / chosen.num_ranks) - 1);
    groups.members[scratch.start[leader] + __popc(earlier)] = uint16_t(pair);
  }
  __syncthreads();
  return before >> 16;
}

// An expert's pairs, or tokens of the shared expert.
struct Item {
  const uint16_t* members;  // null: the shared expert's
  int first;                // token of the shared expert
  int count;
  int num_ranks;

  __device__ __forceinline__ bool is_shared() const { return members == nullptr; }
  __device__ __forceinline__ int token(int t) const {
    return is_shared() ? first + t : members[t] / num_ranks;
  }
  __device__ __forceinline__ float* row_of(const PairRows& rows, int t, int width) const {
    return is_shared() ? rows.shared + int64_t(first + t) * width : rows.routed + int64_t(members[t]) * width;
  }
  __device__ __forceinline__ const uint8_t* data_of(const ExpertMatrix& matrix, const Chosen& chosen) const {
    if (is_shared()) return matrix.shared;
    return reinterpret_cast<const uint8_t*>(matrix.addresses[chosen.ids[members[0]]]);
  }
};

__device__ __forceinline__ int units_of(const MatrixShape& shape) {
  return (shape.num_rows + shape.unit_rows - 1) / shape.unit_rows;
}

// The block's share of the units of all items, all blocks having equally many: calls use(item, begin, end)
// for units begin … end − 1 of each item in it. `shape`: of a routed expert and of the shared one.
template <typename Use>
__device__ __forceinline__ void for_each_part(const Groups& groups, int num_items, const Chosen& chosen,
                                              const GroupedPlan& plan, const MatrixShape (&shape)[2],
                                              Use&& use) {
  const int num_shared = plan.has_shared ? (chosen.num_tokens + plan.item_rows - 1) / plan.item_rows : 0;
  const int routed_units = units_of(shape[0]), shared_units = units_of(shape[1]);
  const int first_routed = num_shared * shared_units, total = first_routed + num_items * routed_units;
  const int end = int(int64_t(total) * (blockIdx.x + 1) / gridDim.x);
#pragma unroll 1
  for (int at = int(int64_t(total) * blockIdx.x / gridDim.x); at < end;) {
    const bool is_shared = at < first_routed;
    const int units = is_shared ? shared_units : routed_units, from = is_shared ? at : at - first_routed;
    const int index = from / units, begin = from - index * units, stop = min(units, begin + end - at);
    Item item = {nullptr, index * plan.item_rows, 0, chosen.num_ranks};
    if (is_shared) {
      item.count = min(plan.item_rows, chosen.num_tokens - item.first);
    } else {
      const int entry = groups.items[index];
      item.members = groups.members + (entry & ((1 << first_bits) - 1));
      item.count = (entry >> first_bits) + 1;
    }
    use(item, begin, stop);
    at += stop - begin;
  }
}

}  // namespace coldstream
