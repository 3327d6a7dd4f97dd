// Shares out the pairs of several tokens, which may want the same experts; see partition.py.
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int partition_threads = 1024, partition_warps = partition_threads / warp_size;
constexpr int most_experts = 1024;
constexpr int most_shared_rows = 128;
static_assert(most_experts <= partition_threads, "a thread has an expert");
static_assert(most_shared_rows < partition_threads, "a thread has a number of rows");

// What the block's threads tell each other.
struct Board {
  int rows[most_experts];              // how many tokens chose the expert; −1 once the CPU is to compute it
  int with[most_shared_rows + 1];      // how many experts that the bus can read so many tokens chose
  int above[most_shared_rows + 1];     // how many of them more tokens chose
  uint64_t cpu[most_shared_rows + 1];  // the CPU's time for all of `above`
  int cpu_of[most_rows];               // as in MissTimes
  int counts[partition_warps];
  uint64_t sums[partition_warps];
  uint64_t best[partition_warps];
  bool is_sent[most_shared_rows];  // whether the CPU needs the token's x
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

// Nanoseconds of the CPU for an expert of so many rows; see `MissTimes.cpu_time`.
__device__ __forceinline__ uint64_t cpu_time(const Board& board, int rows) {
  if (rows <= most_rows) return board.cpu_of[rows - 1];
  return uint64_t(board.cpu_of[most_rows - 1]) * rows / most_rows;
}

// By a whole warp: what the lanes before this one have together.
template <typename Number>
__device__ __forceinline__ Number sum_before(Number value) {
  const int lane = threadIdx.x % warp_size;
  Number sum = value;
#pragma unroll
  for (int step = 1; step < warp_size; step *= 2) {
    const Number other = __shfl_up_sync(all_lanes, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - value;
}

// Fills in `above` and `cpu` from `with`; with a barrier before and behind.
__device__ __forceinline__ void add_up_from_above(Board& board) {
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int rows = most_shared_rows - int(threadIdx.x);  // the first thread has the most
  __syncthreads();
  const int count = rows > 0 ? board.with[rows] : 0;
  const uint64_t time = count ? count * cpu_time(board, rows) : 0;
  int above = sum_before(count);
  uint64_t cpu = sum_before(time);
  if (lane == warp_size - 1) {
    board.counts[warp] = above + count;
    board.sums[warp] = cpu + time;
  }
  __syncthreads();
#pragma unroll 1
  for (int w = 0; rows >= 0 && w < warp; w++) {
    above += board.counts[w];
    cpu += board.sums[w];
  }
  if (rows >= 0) {
    board.above[rows] = above;
    board.cpu[rows] = cpu;
  }
  __syncthreads();
}

// Nanoseconds if the bus reads the first `num_streamed` missing experts and the CPU computes the others; see
// `MissTimes.nanoseconds`.
__device__ __forceinline__ uint64_t time_with(const Board& board, const Sharing& sharing, int num_tokens,
                                              int num_streamed) {
  const MissTimes& times = *sharing.times;
  // `rows` becomes that of the first expert that the CPU has: the least for which above ≤ num_streamed.
  int rows = 0, end = num_tokens;
#pragma unroll 1
  while (rows < end) {
    const int middle = (rows + end) / 2;
    if (board.above[middle] <= num_streamed) {
      end = middle;
    } else {
      rows = middle + 1;
    }
  }
  uint64_t bus = uint64_t(num_streamed) * times.bus;
  if (rows == 0) return bus * times.bus_left / 1024;
  const int of_these = num_streamed - board.above[rows];
  const uint64_t cpu = board.cpu[0] - board.cpu[rows] - of_these * cpu_time(board, rows);
  const uint64_t ahead = times.ahead;
  bus = bus > ahead ? bus - ahead : 0;
  const uint64_t both = bus < cpu ? bus : cpu;
  return times.answer + both + ((bus - both) * times.bus_left + (cpu - both) * times.cpu_left) / 1024;
}

// How many missing experts the bus reads; in all threads.
__device__ __forceinline__ int choose_split(Board& board, const Sharing& sharing, int num_tokens) {
  constexpr int number_bits = 11;
  const int most = min(board.above[0], sharing.staging.room.count);
  uint64_t best = ~uint64_t(0);
#pragma unroll 1
  for (int number = threadIdx.x; number <= most; number += partition_threads) {
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

// Whether the bus reads the thread's expert, which `rows` tokens chose, if it reads `num_streamed` of those
// it can.
__device__ __forceinline__ bool is_read(Board& board, bool is_readable, int rows, int num_streamed) {
  const int before = is_readable ? board.above[rows] : 0;
  // Of one number of rows some may be read and some not: the first ones are.
  const bool is_last_count = is_readable && before < num_streamed && before + board.with[rows] > num_streamed;
  const int earlier = count_before(board, is_last_count);
  return is_readable && before + (is_last_count ? earlier : 0) < num_streamed;
}

// Gives the thread's expert `id`, if the bus reads it, its place, and tells the launch behind this one.
__device__ __forceinline__ void stage(Board& board, const Sharing& sharing, bool is_streamed, int id,
                                      int64_t (&addresses)[num_matrices]) {
  const Staging& staging = sharing.staging;
  __syncthreads();  // the counts of `is_read` have been read
  const int place = count_before(board, is_streamed);
  if (!is_streamed) return;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) addresses[i] = staging.room.address(place, i);
  staging.list[1 + place] = id;
}

// The place of the thread's expert, if a token chose it.
__device__ __forceinline__ void place_by_rows(Board& board, const Sharing& sharing, int num_tokens) {
  const int id = threadIdx.x, rows = board.rows[id];
  int64_t addresses[num_matrices] = {};
  const bool is_missing = rows > 0 && !find_on_device(sharing, id, addresses);
  const bool is_readable = is_missing && find_on_host(sharing, id, addresses);
  if (is_readable) atomicAdd(board.with + rows, 1);
  int num_streamed = 0;
  if (__syncthreads_or(is_missing)) {
    add_up_from_above(board);
    if (sharing.times->bus != 0) num_streamed = choose_split(board, sharing, num_tokens);
    const bool is_streamed = is_read(board, is_readable, rows, num_streamed);
    if (is_missing && !is_streamed) {
#pragma unroll
      for (int i = 0; i < num_matrices; i++) addresses[i] = 0;
      board.rows[id] = -1;
    }
    if (is_streamed && sharing.stamps) add_up(&sharing.stamps->router.pairs, rows);
    stage(board, sharing, is_streamed, id, addresses);
  }
  if (id == 0 && sharing.staging.list) sharing.staging.list[0] = num_streamed;
  if (rows > 0) place_expert(sharing, id, addresses);
}

// Sends the x of the tokens that the CPU needs.
__device__ __forceinline__ void send_rows(const Board& board, const Sharing& sharing, int num_tokens,
                                          const float* x, int x_stride, int cols) {
  for (int token = threadIdx.x / warp_size; token < num_tokens; token += partition_warps) {
    if (board.is_sent[token])
      send_row(x + int64_t(token) * x_stride, sharing.box.x + int64_t(token) * cols, cols);
  }
  __threadfence_system();
}

// grid (1): a thread for each expert, and for pairs in turn. Of up to `most_rows` tokens it also asks the
// CPU.
extern "C" __global__ void __launch_bounds__(partition_threads, 1)
    partition_experts(const int* ids, int num_tokens, int num_ranks, const float* x, int x_stride, int cols,
                      const __grid_constant__ Sharing sharing) {
  __shared__ Board board;
  const int thread = threadIdx.x, num_pairs = num_tokens * num_ranks;
  if (thread < most_rows) board.cpu_of[thread] = sharing.times->cpu[thread];
  if (thread <= most_shared_rows) board.with[thread] = 0;
  if (thread < most_shared_rows) board.is_sent[thread] = false;
  board.rows[thread] = 0;
  wait_for_previous_grid();
  release_next_grid();
  LastAnswer last;
  if (thread == 0) last.look(sharing.box);
  __syncthreads();
#pragma unroll 1
  for (int pair = thread; pair < num_pairs; pair += partition_threads) atomicAdd(board.rows + ids[pair], 1);
  __syncthreads();
  place_by_rows(board, sharing, num_tokens);
  if (thread == 0) last.wait(sharing.box);
  __syncthreads();
  bool asks = false;
#pragma unroll 1
  for (int pair = thread; pair < num_pairs; pair += partition_threads) {
    const bool is_on_cpu = board.rows[ids[pair]] < 0;
    place_pair(sharing, pair, ids[pair], is_on_cpu);
    if (is_on_cpu) board.is_sent[pair / num_ranks] = asks = true;
  }
  if (num_tokens <= most_rows && __syncthreads_or(asks)) {
    send_rows(board, sharing, num_tokens, x, x_stride, cols);
    __syncthreads();
    if (thread == 0) ask_the_cpu(sharing);
  }
  make_room(sharing);
  if (sharing.stamps && thread == 0) sharing.stamps->router.ends = now_ns();
}

constexpr int ask_warps = 8;
constexpr uint32_t one_sent = 1 << 16;  // of the sums in `arrivals`, whose lower bits count blocks

// Behind partition_experts of more than `most_rows` tokens, one for each warp: sends the x of those that the
// CPU needs, and then asks it. `arrivals` is 0 before and after.
extern "C" __global__ void __launch_bounds__((ask_warps * warp_size))
    ask_for_experts(int num_tokens, int num_ranks, const float* x, int x_stride, int cols, uint32_t* arrivals,
                    const __grid_constant__ Sharing sharing) {
  wait_for_previous_grid();
  release_next_grid();
  const int token = blockIdx.x * ask_warps + threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  bool is_on_cpu = false;
  if (token < num_tokens && lane < num_ranks)
    is_on_cpu = sharing.places.cpu_ids[token * num_ranks + lane] >= 0;
  const bool is_sent = __ballot_sync(all_lanes, is_on_cpu) != 0;
  if (is_sent) send_row(x + int64_t(token) * x_stride, sharing.box.x + int64_t(token) * cols, cols);
  __threadfence_system();
  const bool any_is_sent = __syncthreads_or(is_sent);
  if (threadIdx.x != 0) return;
  const uint32_t mine = 1 + any_is_sent * one_sent;
  const uint32_t all = atomicAdd(arrivals, mine) + mine;
  if (all % one_sent != gridDim.x) return;
  *arrivals = 0;
  __threadfence_system();
  if (all >= one_sent) ask_the_cpu(sharing);
}
