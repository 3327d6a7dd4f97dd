// A card that computes experts for another one waits here for that card's requests, and answers them. See
// requests.py; the protocol is that of csrc/hybrid/expert_server.h.
#include "cuda/quantize.cuh"
#include "experts/partition.cuh"

using namespace coldstream;

// From the launch of a loop to a step's first request, whose kernels may be compiled meanwhile.
constexpr uint64_t longest_wait_for_request_ns = 10 * longest_wait_ns;

constexpr int request_threads = 1024, request_warps = request_threads / warp_size;

// Why an answer is undefined.
enum Failure : uint32_t { no_failure, came_too_late, came_in_wrong_order };

// The card that computes.
struct Server {
  uint32_t* is_computing;  // in its memory: whether the request before is unanswered
  uint32_t* is_late;       // likewise: whether no more requests are waited for
  uint32_t* failure;       // in the host's memory
};

// A request's rows in memory of the card that computes, and its pairs.
struct RequestedRows {
  float* x;  // [rows, cols]
  int8_t* q;
  float* scales;
  int16_t* sums;
  int* ids;  // [rows, ranks]; num_experts: the pair is computed elsewhere
  int count, num_ranks, cols, padded, num_experts;
};

__device__ __forceinline__ uint32_t number_of(uint32_t request) { return request & 0xffff; }

// By one thread: the word of a request, or 0 when none has come in time or an answer before was undefined.
__device__ __forceinline__ uint32_t wait_for_request(const Mailbox& box, const Server& server) {
  uint64_t start = 0;
  for (;;) {
    if (const uint32_t found = load_acquire_system(box.request)) return found;
    if (*server.is_late) return 0;
    const uint64_t now = now_ns();
    if (start == 0) start = now;
    if (now - start > longest_wait_for_request_ns) {
      *server.is_late = 1;
      store_relaxed_system(server.failure, came_too_late);
      return 0;
    }
    __nanosleep(nap_ns);
  }
}

__device__ __forceinline__ void answer(const Mailbox& box) { store_release_system(box.done, 1); }

// By one thread: whether `request` has come. False once a later one is there, which is left for the launch
// that waits for it: then nothing was asked of this layer. Others are answered at once, with a failure.
__device__ __forceinline__ bool take_request(const Mailbox& box, const Server& server, uint32_t request) {
  for (;;) {
    const uint32_t found = wait_for_request(box, server);
    if (found == 0 || number_of(found) > number_of(request)) return false;
    store_relaxed_system(box.request, 0);
    if (found == request) return true;
    store_relaxed_system(server.failure, came_in_wrong_order);
    answer(box);
    if (number_of(found) == number_of(request)) return false;
  }
}

// Whether any pair of a row is computed here, by a warp.
__device__ __forceinline__ bool is_asked_of(const RequestedRows& rows, int row) {
  const int lane = threadIdx.x % warp_size;
  const bool is_here = lane < rows.num_ranks && rows.ids[row * rows.num_ranks + lane] < rows.num_experts;
  return __ballot_sync(all_lanes, is_here) != 0;
}

// Some inputs of a row, by a warp.
__device__ __forceinline__ void fetch_group(const Mailbox& box, const RequestedRows& rows, int row,
                                            int group) {
  const int lane = threadIdx.x % warp_size;
  const int left = rows.cols - group * group_elements, first = group * group_elements + 8 * lane;
  float values[8];
  load_share(box.x + int64_t(row) * rows.cols + group * group_elements, left, values);
  if (8 * lane < left) {
    float4* const to = reinterpret_cast<float4*>(rows.x + int64_t(row) * rows.cols + first);
    to[0] = {values[0], values[1], values[2], values[3]};
    to[1] = {values[4], values[5], values[6], values[7]};
  }
  store_group(quantize_group(values), quant_row(rows.q, rows.scales, rows.sums, row, rows.padded), group);
}

// grid (1), behind the launches that compute the request before, whose answer it gives. What it finds is
// computed by those behind it.
extern "C" __global__ void __launch_bounds__(request_threads, 1)
    next_request(const __grid_constant__ Mailbox box, const __grid_constant__ Server server, uint32_t request,
                 const __grid_constant__ RequestedRows rows) {
  __shared__ bool is_taken;
  const int thread = threadIdx.x;
  if (thread == 0) {
    if (*server.is_computing) answer(box);
    is_taken = take_request(box, server, request);
    *server.is_computing = is_taken;
  }
  __syncthreads();
  const int warp = thread / warp_size, groups = rows.padded / group_elements;
  // Of the only row the inputs are read at once: a read of the host's memory takes a microsecond. The last
  // warp has the fewest of them, and reads the ids.
  if (is_taken && rows.count == 1) {
#pragma unroll 1
    for (int group = warp; group < groups; group += request_warps) fetch_group(box, rows, 0, group);
  }
#pragma unroll 1
  for (int pair = request_threads - 1 - thread; pair < rows.count * rows.num_ranks; pair += request_threads) {
    const int id = is_taken ? box.ids[pair] : -1;
    rows.ids[pair] = id < 0 || id >= rows.num_experts ? rows.num_experts : id;
  }
  if (!is_taken || rows.count == 1) return;
  __syncthreads();
#pragma unroll 1
  for (int i = warp; i < rows.count * groups; i += request_warps) {
    if (is_asked_of(rows, i / groups)) fetch_group(box, rows, i / groups, i % groups);
  }
}

// grid (1), at the end of a step's requests: answers the last one, and `request`, for which nothing is
// computed.
extern "C" __global__ void __launch_bounds__(32)
    last_request(const __grid_constant__ Mailbox box, const __grid_constant__ Server server,
                 uint32_t request) {
  if (threadIdx.x != 0) return;
  if (*server.is_computing) answer(box);
  *server.is_computing = 0;
  if (take_request(box, server, request)) answer(box);
}

// grid (1), on the card that asks, behind all layers of a step.
extern "C" __global__ void __launch_bounds__(32)
    end_requests(const __grid_constant__ Mailbox box, uint32_t request) {
  if (threadIdx.x != 0) return;
  LastAnswer last;
  last.look(box);
  last.wait(box);
  ask(box, request);
}
