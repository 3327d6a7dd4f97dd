// Pairs (token, rank) grouped by expert, and the groups split into tiles; see cuda_gemm.py.
#include "cuda/common.cuh"

using namespace coldstream;

// A block an expert e = blockIdx.x: counts[e] = {n, first}, where n pairs have expert e and `first` pairs
// have a smaller one. pairs[first … first + n − 1] are the pairs of e in ascending order, and tokens[…] the
// token of each. Ids outside 0 … gridDim.x − 1 belong to no group.
constexpr int group_threads = 1024, group_warps = group_threads / warp_size;

__device__ void count_segment(const int* ids, int begin, int end, int expert, int& before, int& equal) {
  before = equal = 0;
#pragma unroll 8
  for (int pair = begin + int(threadIdx.x % warp_size); pair < end; pair += warp_size) {
    const int id = ids[pair];
    before += id >= 0 && id < expert;
    equal += id == expert;
  }
  before = sum_of_lanes(before);
  equal = sum_of_lanes(equal);
}

extern "C" __global__ void __launch_bounds__(group_threads)
    group_pairs(const int* ids, int num_pairs, int num_ranks, int2* counts, int* pairs, int* tokens) {
  __shared__ int before_of[group_warps], equal_of[group_warps];
  release_next_grid();
  wait_for_previous_grid();
  const int expert = blockIdx.x, warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int segment = (num_pairs + group_threads - 1) / group_threads * warp_size;
  const int begin = min(warp * segment, num_pairs), end = min(begin + segment, num_pairs);
  int before, equal;
  count_segment(ids, begin, end, expert, before, equal);
  if (lane == 0) {
    before_of[warp] = before;
    equal_of[warp] = equal;
  }
  __syncthreads();
  int start = 0, count = 0, at = 0;
  for (int w = 0; w < group_warps; w++) {
    start += before_of[w];
    count += equal_of[w];
    if (w < warp) at += equal_of[w];
  }
  at += start;
  if (threadIdx.x == 0) counts[expert] = make_int2(count, start);
  if (equal == 0) return;
#pragma unroll 4
  for (int base = begin; base < end; base += warp_size) {
    const int pair = base + lane;
    const bool mine = pair < end && ids[pair] == expert;
    const uint32_t lanes = __ballot_sync(all_lanes, mine);
    if (mine) {
      const int to = at + __popc(lanes & ((1u << lane) - 1));
      pairs[to] = pair;
      tokens[to] = pair / num_ranks;
    }
    at += __popc(lanes);
  }
}

// Splits the groups into tiles of at most `tile_tokens` pairs. tiles[0].x is the number of tiles, and each
// tile after it is {pairs, first, expert, 0}. Experts with an address 0 in any of the tables get no tiles.
// One block.
constexpr int plan_threads = 1024;

extern "C" __global__ void __launch_bounds__(plan_threads)
    plan_tiles(const int2* counts, int num_experts, int tile_tokens, const int64_t* gate, const int64_t* up,
               const int64_t* down, int4* tiles) {
  __shared__ int ends[plan_threads / warp_size];
  release_next_grid();
  wait_for_previous_grid();
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  int total = 0;
  for (int first = 0; first < num_experts; first += plan_threads) {
    const int expert = first + threadIdx.x;
    int2 group = make_int2(0, 0);
    if (expert < num_experts && gate[expert] && up[expert] && down[expert]) group = counts[expert];
    const int num_tiles = (group.x + tile_tokens - 1) / tile_tokens;
    int end = num_tiles;  // inclusive sum over the experts so far
    for (int step = 1; step < warp_size; step *= 2) {
      const int other = __shfl_up_sync(all_lanes, end, step);
      if (lane >= step) end += other;
    }
    __syncthreads();
    if (lane == warp_size - 1) ends[warp] = end;
    __syncthreads();
    int chunk_total = 0;
    for (int w = 0; w < plan_threads / warp_size; w++) {
      if (w < warp) end += ends[w];
      chunk_total += ends[w];
    }
    for (int i = 0; i < num_tiles; i++)
      tiles[1 + total + end - num_tiles + i] =
          make_int4(min(group.x - i * tile_tokens, tile_tokens), group.y + i * tile_tokens, expert, 0);
    total += chunk_total;
  }
  if (threadIdx.x == 0) tiles[0] = make_int4(total, 0, 0, 0);
}

// Both for a few tokens, of which a word has a bit each, by one block: what `group_pairs` and then
// `plan_tiles` write. A row has no id of an expert twice.
constexpr int block_experts = 1024, block_words = 4;

struct TileTables {
  const int64_t *gate, *up, *down;  // by expert
};

// The sum over the threads of the block before this one, in two halves of 16 bits; `total` gets that over
// all.
__device__ __forceinline__ int sum_before(int own, int& total) {
  __shared__ int ends[group_warps];
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  int end = own;
  for (int step = 1; step < warp_size; step *= 2) {
    const int other = __shfl_up_sync(all_lanes, end, step);
    if (lane >= step) end += other;
  }
  if (lane == warp_size - 1) ends[warp] = end;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < group_warps; w++) {
    if (w < warp) end += ends[w];
    total += ends[w];
  }
  return end - own;
}

extern "C" __global__ void __launch_bounds__(group_threads)
    group_and_plan(const int* ids, int num_pairs, int num_ranks, int num_experts, int tile_tokens,
                   TileTables tables, int2* counts, int* pairs, int* tokens, int4* tiles) {
  __shared__ uint32_t of_expert[block_experts][block_words];  // a bit for each token
  __shared__ int begin_of[block_experts];
  release_next_grid();
  const int expert = threadIdx.x;
  for (int w = 0; w < block_words; w++) of_expert[expert][w] = 0;
  __syncthreads();
  wait_for_previous_grid();
  const bool is_here =
      expert < num_experts && tables.gate[expert] && tables.up[expert] && tables.down[expert];
#pragma unroll 1
  for (int pair = threadIdx.x; pair < num_pairs; pair += group_threads) {
    const int id = ids[pair], token = pair / num_ranks;
    if (id >= 0 && id < num_experts) atomicOr(&of_expert[id][token / 32], 1u << token % 32);
  }
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int w = 0; w < block_words; w++) count += __popc(of_expert[expert][w]);
  const int num_tiles = is_here ? (count + tile_tokens - 1) / tile_tokens : 0;
  int total;
  const int before = sum_before(num_tiles << 16 | count, total), start = before & 0xffff;
  begin_of[expert] = start;
  if (expert < num_experts) counts[expert] = make_int2(count, start);
  for (int i = 0; i < num_tiles; i++)
    tiles[1 + (before >> 16) + i] =
        make_int4(min(count - i * tile_tokens, tile_tokens), start + i * tile_tokens, expert, 0);
  if (threadIdx.x == 0) tiles[0] = make_int4(total >> 16, 0, 0, 0);
  __syncthreads();
#pragma unroll 1
  for (int pair = threadIdx.x; pair < num_pairs; pair += group_threads) {
    const int id = ids[pair], token = pair / num_ranks;
    if (id < 0 || id >= num_experts) continue;
    int to = begin_of[id] + __popc(of_expert[id][token / 32] & ((1u << token % 32) - 1));
    for (int w = 0; w < token / 32; w++) to += __popc(of_expert[id][w]);
    pairs[to] = pair;
    tokens[to] = token;
  }
}
