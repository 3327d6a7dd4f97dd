// What two cards take to work on one token together: questions and answers of a row, and reads of the other
// card's memory. See two_cards.py.
#include "cuda/answer.cuh"

using namespace coldstream;

constexpr int threads = 256;
constexpr uint64_t patience_ns = 2'000'000'000;  // of every wait: then the counts say so

// One way of a row, and of the flag behind it.
struct Way {
  uint32_t* flag;
  float4* row;
  int quads;
};

struct Counts {
  uint64_t begins, ends;  // of the questions that are timed
  uint32_t wrong, late;
};

__device__ __forceinline__ float value_of(uint32_t number, int quad) {
  return float(number % 4096 * 512 + quad);
}

__device__ __forceinline__ void send(const Way& to, uint32_t number, float more) {
  for (int i = threadIdx.x; i < to.quads; i += threads) {
    const float value = value_of(number, i) + more;
    to.row[i] = {value, value, value, value};
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release_system(to.flag, number);
  __syncthreads();
}

// False when it came too late.
__device__ __forceinline__ bool wait_for(const uint32_t* flag, uint32_t number, Counts* counts) {
  if (threadIdx.x == 0) {
    const uint64_t start = now_ns();
    while (load_acquire_system(flag) != number && counts->late == 0) {
      if (now_ns() - start > patience_ns) counts->late = 1;
    }
  }
  __syncthreads();
  return *static_cast<volatile uint32_t*>(&counts->late) == 0;
}

__device__ __forceinline__ bool is_row(float4 v, uint32_t number, int quad, float more) {
  const float value = value_of(number, quad) + more;
  return v.x == value && v.y == value && v.z == value && v.w == value;
}

__device__ __forceinline__ void check(const Way& from, uint32_t number, float more, Counts* counts) {
  for (int i = threadIdx.x; i < from.quads; i += threads) {
    if (!is_row(load_relaxed_system(from.row + i), number, i, more)) atomicAdd(&counts->wrong, 1u);
  }
  __syncthreads();
}

// Rows that say by themselves that they are there, as in cuda/answer.cuh.
__device__ __forceinline__ void check_marked(const Way& from, uint32_t number, float more, Counts* counts) {
  const uint64_t start = now_ns();
  for (int i = threadIdx.x; i < from.quads; i += threads) {
    float4 v = load_relaxed_system(from.row + i);
    while (!is_written(v) && counts->late == 0) {
      if (now_ns() - start > patience_ns) counts->late = 1;
      v = load_relaxed_system(from.row + i);
    }
    if (!is_row(v, number, i, more)) atomicAdd(&counts->wrong, 1u);
    const float mark = __uint_as_float(unwritten_bits);
    from.row[i] = {mark, mark, mark, mark};
  }
  __syncthreads();
}

// grid (1). Asks so many times, and waits for each answer: by its flag, or by marks in its row.
extern "C" __global__ void __launch_bounds__(threads)
    ask(Way to, Way from, uint32_t questions, uint32_t first_timed, int is_marked, Counts* counts) {
  for (uint32_t number = 1; number <= questions; number++) {
    if (threadIdx.x == 0 && number == first_timed) counts->begins = now_ns();
    send(to, number, 0.0f);
    if (is_marked) {
      check_marked(from, number, 0.5f, counts);
    } else {
      if (!wait_for(from.flag, number, counts)) return;
      check(from, number, 0.5f, counts);
    }
  }
  if (threadIdx.x == 0) counts->ends = now_ns();
}

// grid (1), on the other card.
extern "C" __global__ void __launch_bounds__(threads)
    answer(Way from, Way to, uint32_t questions, Counts* counts) {
  for (uint32_t number = 1; number <= questions; number++) {
    if (!wait_for(from.flag, number, counts)) return;
    check(from, number, 0.0f, counts);
    send(to, number, 0.5f);
  }
}

// Parts of a layer. Its number is the number.
extern "C" __global__ void __launch_bounds__(threads) send_row(Way to, uint32_t layer, int is_answer) {
  send(to, layer, is_answer ? 0.5f : 0.0f);
}

extern "C" __global__ void __launch_bounds__(threads) await_row(Way from, uint32_t layer, Counts* counts) {
  if (wait_for(from.flag, layer, counts)) check(from, layer, 0.0f, counts);
}

extern "C" __global__ void __launch_bounds__(threads) await_answer(Way from, uint32_t layer, Counts* counts) {
  check_marked(from, layer, 0.5f, counts);
}

// On all processors, as long as other work of a layer would take.
extern "C" __global__ void __launch_bounds__(threads) compute(int nanoseconds) {
  const uint64_t start = now_ns();
  while (int64_t(now_ns() - start) < nanoseconds) {
  }
}

// Reads adjacent memory once, wherever it lies.
extern "C" __global__ void __launch_bounds__(threads)
    read_all(const uint4* from, uint64_t quads, uint32_t* sink) {
  constexpr int at_once = 8;
  uint32_t sum = 0;
  const uint64_t stride = uint64_t(gridDim.x) * threads;
  for (uint64_t i = blockIdx.x * threads + threadIdx.x; i < quads; i += at_once * stride) {
    uint4 v[at_once];
#pragma unroll
    for (int k = 0; k < at_once; k++) v[k] = i + k * stride < quads ? from[i + k * stride] : uint4{};
#pragma unroll
    for (int k = 0; k < at_once; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}
