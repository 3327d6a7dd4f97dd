// The routed experts of many tokens: pairs (token, rank) grouped by expert, then two products over the
// groups.
#include "cuda/many_tiles.cuh"

using namespace coldstream;
using namespace coldstream::many;

// Group `blockIdx.x`: counts[e] = {pairs of expert e, pairs of experts before it}, and the pairs themselves
// in ascending order from there on, with the token of each. Ids outside 0 … gridDim.x − 1 belong to no group.
constexpr int group_threads = 1024, group_warps = group_threads / warp_size;

__device__ void count_segment(const int* ids, int begin, int end, int expert, int& before, int& equal) {
  before = equal = 0;
#pragma unroll 8
  for (int pair = begin + int(threadIdx.x % warp_size); pair < end; pair += warp_size) {
    const int id = ids[pair];
    before += id >= 0 && id < expert;
    equal += id == expert;
  }
  before = __reduce_add_sync(all_lanes, before);
  equal = __reduce_add_sync(all_lanes, equal);
}

extern "C" __global__ void __launch_bounds__(group_threads)
    group_pairs(const int* ids, int num_pairs, int num_ranks, int2* counts, int* pairs, int* tokens) {
  __shared__ int before_of[group_warps], equal_of[group_warps];
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

// Groups cut into tiles of at most `tile_tokens` pairs: tiles[0].x is their number, then {pairs, first,
// expert, 0} each. An expert with an address 0 in any table has none. One block of plan_threads.
constexpr int plan_threads = 1024;

extern "C" __global__ void __launch_bounds__(plan_threads) plan_tiles(
    const int2* counts, int num_experts, int tile_tokens, const int64_t* gate, const int64_t* up,
    const int64_t* down, int4* tiles) {
  __shared__ int ends[plan_threads / warp_size];
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

// gated: rows 16i … 16i + 7 of a tile are gate's and the next eight up's, so that one thread has both of a
// pair.
template <bool gated>
struct experts_job {
  activations x;
  const int64_t* addresses;
  const int64_t* up_addresses;
  const int4* tiles;
  const int* x_rows;    // of a grouped pair; null: its own place
  const int* out_rows;  // the same
  float* out;
  int num_rows, num_blocks, row_bytes, out_stride;

  template <class T>
  static constexpr int tile_rows = gated ? T::rows / 2 : T::rows;  // of the output

  template <class T>
  __device__ source open(int index) const {
    const int row_tiles = (num_rows + tile_rows<T> - 1) / tile_rows<T>;
    source tile = {};
    if (index / row_tiles >= tiles[0].x) return tile;
    const int4 entry = tiles[1 + index / row_tiles];
    tile.head = {entry.x, entry.y, index % row_tiles * tile_rows<T>, 0};
    tile.rows = reinterpret_cast<const uint8_t*>(addresses[entry.z]);
    if (gated) tile.rows_8 = reinterpret_cast<const uint8_t*>(up_addresses[entry.z]);
    return tile;
  }

  // Row `row` of a tile, the last of the matrix for those beyond it.
  template <class T>
  __device__ const uint8_t* weight_row(const source& tile, int row) const {
    const int row_in_matrix = tile.head.row + (gated ? row / 16 * 8 + row % 8 : row);
    return (gated && row / 8 % 2 ? tile.rows_8 : tile.rows) +
           int64_t(min(row_in_matrix, num_rows - 1)) * row_bytes;
  }

  __device__ int activation_row(int place) const { return x_rows ? x_rows[place] : place; }
  __device__ int out_row(int place) const { return out_rows ? out_rows[place] : place; }

  __device__ void store(int64_t out_row, int first_row, int row, float value, float value_8) const {
    float* to = out + out_row * out_stride;
    if constexpr (gated) {
      row = first_row + row / 16 * 8 + row % 8;
      if (row < num_rows) to[row] = exact_swiglu(value, value_8);
    } else {
      row += first_row;
      if (row < num_rows) to[row] = value;
      if (row + 8 < num_rows) to[row + 8] = value_8;
    }
  }
};

template <class T, bool gated>
__global__ void __launch_bounds__(T::threads, T::blocks)
    experts_many(const __grid_constant__ experts_job<gated> job) {
  multiply_tiles<T>(job);
}
