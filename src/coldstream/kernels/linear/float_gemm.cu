// GEMM of float weights, y = x W^T: sixteen accumulators per output, p[i mod 16] = fma(x_i, w_i, ·).
//
// Sixteen neighbouring lanes share a tile of thread_tokens * thread_rows outputs; lane r owns the
// accumulators of inputs i = r (mod 16), so that an output's sums stay in order and end in one tree over
// lanes.
#include "linear/float_lanes.cuh"

using namespace coldstream;

constexpr int threads = 512;
constexpr int group_columns = 4;  // groups of sixteen lanes side by side in a tile

struct Float32 {
  using Storage = float;
  static __device__ float value(float v) { return v; }
};
struct Float16 {
  using Storage = uint16_t;
  static __device__ float value(uint16_t v) { return half_to_float(v); }
};
struct Bfloat16 {
  using Storage = uint16_t;
  static __device__ float value(uint16_t v) { return bfloat16_to_float(v); }
};

// depth: inputs of a stage.
template <class Weights_, int thread_tokens_, int thread_rows_, int depth_>
struct FloatTiling {
  using Weights = Weights_;
  static constexpr int thread_tokens = thread_tokens_, thread_rows = thread_rows_, depth = depth_;
  static constexpr int tile_rows = group_columns * thread_rows;
  static constexpr int tile_tokens = threads / lanes / group_columns * thread_tokens;
  static constexpr int pitch =
      depth + (thread_rows == 8 ? 2 : 4);  // a warp's two groups read different banks
  static constexpr int rows_at_once = threads / depth;
  static_assert(thread_rows * pitch % 32 == lanes && thread_tokens * thread_rows % lanes == 0);

  struct Stage {
    float x[tile_tokens][pitch];
    float w[tile_rows][pitch];
  };
};

// What a block multiplies: x is [tokens, values] with x_stride floats between rows, w [rows, values] with
// adjacent rows; out [tokens, rows] has out_stride floats between rows.
struct FloatJob {
  const float* x;
  const void* w;
  float* out;
  int num_tokens, num_rows, num_values, x_stride, out_stride;
};

// This thread's values of the next stage; zeros past the ends.
template <class T>
struct Fetched {
  using Storage = typename T::Weights::Storage;
  static constexpr int x_passes = T::tile_tokens / T::rows_at_once, w_passes = T::tile_rows / T::rows_at_once;
  float x[x_passes], w[w_passes];

  __device__ void load(const FloatJob& job, int first_token, int first_row, int first) {
    const int column = first + threadIdx.x % T::depth, row = threadIdx.x / T::depth;
#pragma unroll
    for (int i = 0; i < x_passes; i++) {
      const int token = first_token + row + i * T::rows_at_once;
      const bool exists = token < job.num_tokens && column < job.num_values;
      x[i] = exists ? job.x[int64_t(token) * job.x_stride + column] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < w_passes; i++) {
      const int at = first_row + row + i * T::rows_at_once;
      const bool exists = at < job.num_rows && column < job.num_values;
      const Storage* from = static_cast<const Storage*>(job.w) + int64_t(at) * job.num_values + column;
      w[i] = exists ? T::Weights::value(*from) : 0.0f;
    }
  }

  __device__ void store(typename T::Stage& to) const {
    const int column = threadIdx.x % T::depth, row = threadIdx.x / T::depth;
#pragma unroll
    for (int i = 0; i < x_passes; i++) to.x[row + i * T::rows_at_once][column] = x[i];
#pragma unroll
    for (int i = 0; i < w_passes; i++) to.w[row + i * T::rows_at_once][column] = w[i];
  }
};

// The last `count` inputs. Those past the end are skipped, as adding 0 would turn a sum of −0 into 0.
template <class T>
__device__ __forceinline__ void add_stage(const typename T::Stage& from, int count, int token, int row,
                                          int lane, float (&p)[T::thread_tokens][T::thread_rows]) {
#pragma unroll
  for (int step = 0; step < T::depth; step += lanes) {
    if (step + lane >= count) break;
    float x[T::thread_tokens], w[T::thread_rows];
#pragma unroll
    for (int i = 0; i < T::thread_tokens; i++) x[i] = from.x[token + i][step + lane];
#pragma unroll
    for (int j = 0; j < T::thread_rows; j++) w[j] = from.w[row + j][step + lane];
#pragma unroll
    for (int i = 0; i < T::thread_tokens; i++)
#pragma unroll
      for (int j = 0; j < T::thread_rows; j++) p[i][j] = __fmaf_rn(x[i], w[j], p[i][j]);
  }
}

template <class T>
__global__ void __launch_bounds__(threads, 1) float_gemm(const __grid_constant__ FloatJob job) {
  __shared__ typename T::Stage stages[2];
  const int first_row = blockIdx.x * T::tile_rows, first_token = blockIdx.y * T::tile_tokens;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int row = group % group_columns * T::thread_rows, token = group / group_columns * T::thread_tokens;
  float p[T::thread_tokens][T::thread_rows] = {};
  Fetched<T> next;
  next.load(job, first_token, first_row, 0);
  for (int first = 0, which = 0; first < job.num_values; first += T::depth, which ^= 1) {
    next.store(stages[which]);
    __syncthreads();
    next.load(job, first_token, first_row, first + T::depth);
    add_stage<T>(stages[which], job.num_values - first, token, row, lane, p);
  }
#pragma unroll
  for (int base = 0; base < T::thread_tokens * T::thread_rows; base += lanes) {
    float sums[lanes];
#pragma unroll
    for (int k = 0; k < lanes; k++) sums[k] = p[(base + k) / T::thread_rows][(base + k) % T::thread_rows];
    const float sum = sum_of_lanes(sums, lane);
    const int out_token = first_token + token + (base + lane) / T::thread_rows;
    const int out_row = first_row + row + (base + lane) % T::thread_rows;
    if (out_token < job.num_tokens && out_row < job.num_rows)
      job.out[int64_t(out_token) * job.out_stride + out_row] = sum;
  }
}
