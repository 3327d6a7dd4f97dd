// Shares out the pairs of several tokens, which may want the same experts; see partition.py.
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int partition_threads = 1024, partition_warps = partition_threads / warp_size;
constexpr int most_experts = 1024;
static_assert(most_rows * most_ranks <= partition_threads, "a thread has a pair");

// What the block's threads tell each other.
struct Board {
  uint32_t first[most_experts];  // of a chosen expert: its first pair
  int rows[most_experts];        // how many tokens chose it; −1 once the CPU is to compute it
  int with[most_rows + 1];       // how many missing experts so many tokens chose
  int cpu[most_rows];            // as in MissTimes
  int counts[partition_warps];
  uint64_t best[partition_warps];
  bool is_sent[most_rows];  // whether the CPU needs the token's x
};

__device__ __forceinline__ uint64_t min_in_block(Board& board, uint64_t value) {
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(all_lanes, value, step);
    if (other < value) value = other;
  }
  if (lane == 0) board.best[warp] = value;
  __syncthreads();
  value = board.best[lane];
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(all_lanes, value, step);
    if (other < value) value = other;
  }
  return value;
}

// Nanoseconds if the bus reads the first `num_streamed` missing experts and the CPU computes the others; see
// `MissTimes.nanoseconds`.
__device__ __forceinline__ uint64_t time_with(const Board& board, const Sharing& sharing, int num_tokens,
                                              int num_streamed) {
  const MissTimes& times = *sharing.times;
  uint64_t cpu = 0;
  int left = num_streamed, num_on_cpu = 0;
#pragma unroll 1
  for (int rows = num_tokens; rows > 0; rows--) {
    const int all = board.with[rows], here = min(all, left);
    left -= here;
    num_on_cpu += all - here;
    cpu += uint64_t(all - here) * board.cpu[rows - 1];
  }
  uint64_t bus = uint64_t(num_streamed) * times.bus;
  if (num_on_cpu == 0) return bus * times.bus_left / 1024;
  const uint64_t ahead = times.ahead;
  bus = bus > ahead ? bus - ahead : 0;
  const uint64_t both = bus < cpu ? bus : cpu;
  return times.answer + both + ((bus - both) * times.bus_left + (cpu - both) * times.cpu_left) / 1024;
}

// How many missing experts the bus reads; in all threads.
__device__ __forceinline__ int choose_split(Board& board, const Sharing& sharing, int num_tokens) {
  constexpr int number_bits = 11;
  int num_missing = 0;
#pragma unroll 1
  for (int rows = 1; rows <= num_tokens; rows++) num_missing += board.with[rows];
  uint64_t best = ~uint64_t(0);
#pragma unroll 1
  for (int number = threadIdx.x; number <= min(num_missing, sharing.landing.room.count);
       number += partition_threads) {
    const uint64_t key = time_with(board, sharing, num_tokens, number) << number_bits | number;
    if (key < best) best = key;
  }
  return int(min_in_block(board, best) & ((1 << number_bits) - 1));
}

// How many threads before this one have `is_one`; with a barrier, in all threads.
__device__ __forceinline__ int count_before(Board& board, bool is_one) {
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const uint32_t lanes = __ballot_sync(all_lanes, is_one);
  if (lane == 0) board.counts[warp] = __popc(lanes);
  __syncthreads();
  int before = __popc(lanes & ((1u << lane) - 1));
#pragma unroll 1
  for (int w = 0; is_one && w < warp; w++) before += board.counts[w];
  return before;
}

// Whether the bus reads the thread's missing expert, which `rows` tokens chose, if it reads `num_streamed`.
__device__ __forceinline__ bool is_read(Board& board, bool is_missing, int rows, int num_tokens, int num_streamed) {
  int before = 0;  // missing experts of more rows
#pragma unroll 1
  for (int more = num_tokens; is_missing && more > rows; more--) before += board.with[more];
  // Of one number of rows some may be read and some not: the first ones are.
  const bool is_border = is_missing && before < num_streamed && before + board.with[rows] > num_streamed;
  const int earlier = count_before(board, is_border);
  return is_missing && before + (is_border ? earlier : 0) < num_streamed;
}

// Gives the thread's expert `id`, if the bus reads it, its place, and tells the launch behind this one.
__device__ __forceinline__ void land(Board& board, const Sharing& sharing, bool is_streamed, int id,
                                     int64_t (&addresses)[num_matrices]) {
  const Landing& landing = sharing.landing;
  __syncthreads();  // the counts of `is_read` have been read
  const int place = count_before(board, is_streamed);
  if (!is_streamed) return;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) addresses[i] = landing.room.address(place, i);
  landing.list[1 + place] = id;
}

// Sends the x of the tokens that the CPU needs.
__device__ __forceinline__ void send_rows(const Board& board, const Sharing& sharing, int num_tokens, const float* x,
                                          int x_stride, int cols) {
  for (int token = threadIdx.x / warp_size; token < num_tokens; token += partition_warps) {
    if (board.is_sent[token])
      send_row(x + int64_t(token) * x_stride, sharing.box.x + int64_t(token) * cols, cols);
  }
  __threadfence_system();
}

// grid (1): a thread for each pair, the first one of an expert for the expert.
extern "C" __global__ void __launch_bounds__(partition_threads, 1)
    partition_experts(const int* ids, int num_tokens, int num_ranks, const float* x, int x_stride, int cols,
                      const __grid_constant__ Sharing sharing) {
  __shared__ Board board;
  const uint32_t pair = threadIdx.x;
  if (pair < most_rows) board.cpu[pair] = sharing.times->cpu[pair];
  if (pair <= most_rows) board.with[pair] = 0;
  if (pair < most_rows) board.is_sent[pair] = false;
  wait_for_previous_grid();
  release_next_grid();
  const bool exists = int(pair) < num_tokens * num_ranks;
  const int id = exists ? ids[pair] : 0;
  if (exists) {
    board.first[id] = ~0u;
    board.rows[id] = 0;
  }
  __syncthreads();
  if (exists) {
    atomicMin(board.first + id, pair);
    atomicAdd(board.rows + id, 1);
  }
  __syncthreads();
  const bool is_first = exists && board.first[id] == pair;
  const int rows = exists ? board.rows[id] : 0;
  int64_t addresses[num_matrices] = {};
  const bool is_missing = is_first && !find_on_device(sharing, id, addresses);
  if (is_missing) atomicAdd(board.with + rows, 1);
  int num_streamed = 0;
  if (__syncthreads_or(is_missing)) {
    if (sharing.matrix[0].mapped != 0 && sharing.times->bus != 0)
      num_streamed = choose_split(board, sharing, num_tokens);
    const bool is_streamed = is_read(board, is_missing, rows, num_tokens, num_streamed);
    if (is_missing && !is_streamed) {
#pragma unroll
      for (int i = 0; i < num_matrices; i++) addresses[i] = 0;
      board.rows[id] = -1;
    }
    if (is_streamed && sharing.stamps) add_up(&sharing.stamps->router.pairs, rows);
    land(board, sharing, is_streamed, id, addresses);
    __syncthreads();
  }
  if (pair == 0 && sharing.landing.list) sharing.landing.list[0] = num_streamed;
  if (is_first) place_expert(sharing, id, addresses);
  const bool is_on_cpu = exists && board.rows[id] < 0;
  if (exists) place_pair(sharing, pair, id, is_on_cpu);
  if (is_on_cpu) board.is_sent[pair / num_ranks] = true;
  if (__syncthreads_or(is_on_cpu)) {
    send_rows(board, sharing, num_tokens, x, x_stride, cols);
    __syncthreads();
    if (threadIdx.x == 0) ask_the_cpu(sharing);
  }
  make_room(sharing);
  if (sharing.stamps && threadIdx.x == 0) sharing.stamps->router.ends = now_ns();
}
