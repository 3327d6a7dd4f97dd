// Residual streams that lie side by side in a row: an update of all of them with the norm of each, the gate
// of their mixture, and the mixture itself. See reference.py for their meaning and cuda.py for the launchers.
#include "rms_norm/expert_sum.cuh"
#include "rms_norm/norm_row.cuh"

using namespace coldstream;

constexpr int max_threads = 640, max_streams = 8;

extern __shared__ float4 dynamic_shared[];  // a block's streams of a row, padded with zeros to whole groups

struct StreamRows {
  const float* x;          // [rows, streams · size]; null: every stream becomes the update
  const float* injection;  // [rows, streams], logits of its weights; null if x is
  float* sum;              // [rows, streams · size]; may be x
  int num_streams;
  int size;  // a multiple of 8
};

// The streams of a row that a block takes: all, or with gridDim.y > 1 as many as other blocks, which then
// have whole groups of 256 columns. Their weights of norms are loaded before the previous grid has ended.
struct OwnStreams {
  int count, size, first_column;
  Norm norm;      // of these streams alone
  Eight weights;  // of the group that the warp has first

  __device__ __forceinline__ OwnStreams(int num_streams, int size, const Norm& all)
      : count(num_streams / gridDim.y), size(size), first_column(blockIdx.y * count * size), norm(all) {
    norm.weight += first_column;
    norm.cols = count * size;
    if (gridDim.y > 1) norm.padded = norm.cols;
    weights = load_eight<true>(norm.weight, threadIdx.x / warp_size, norm.cols);
  }
};

// 1 / sqrt(mean of squares + eps) of `size` values in shared memory, in all lanes of a warp.
__device__ __forceinline__ float inverse_norm_of_stream(const float* x, int size, float eps) {
  if (size % group_elements == 0) return inverse_norm({nullptr, size, size, eps}, x);
  float p = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x % 16; i < size; i += 16) p = __fmaf_rn(x[i], x[i], p);
  return inverse_sqrt(sum_of_sixteen_lanes(p, 1) / float(size) + eps);
}

// The norm of each of a block's streams, which lie in shared memory. `all`: of the whole row. By all threads,
// once they have been synchronised.
__device__ __forceinline__ void norm_streams_of_row(const OwnStreams& own, const Norm& all,
                                                    const NormOutputs& out) {
  __shared__ float scales[max_streams];
  const int64_t row = blockIdx.x, begin = row * all.cols + own.first_column;
  const float* shared = reinterpret_cast<const float*>(dynamic_shared);
  const int warp = threadIdx.x / warp_size, num_warps = blockDim.x / warp_size;
  for (int c = warp; c < own.count; c += num_warps) {
    const float found = inverse_norm_of_stream(shared + c * own.size, own.size, own.norm.eps);
    if (threadIdx.x % warp_size == 0) scales[c] = found;
  }
  __syncthreads();
  const QuantRow quantised = quant_row(out.q, out.scales, out.sums, row, all.padded);
  const int first_group = own.first_column / group_elements, cols = own.norm.cols;
  for (int group = warp; group < own.norm.padded / group_elements; group += num_warps) {
    const int first = group * group_elements + 8 * (threadIdx.x % warp_size);
    float y[8] = {};
    if (first < cols) {
      const Eight x = {dynamic_shared[first / 4], dynamic_shared[first / 4 + 1]};
      const Eight weights = group == warp ? own.weights : load_eight<true>(own.norm.weight, group, cols);
      scale_eight(x, scales[first / own.size], weights, y);
    }
    store_eight<true>(out.y + begin, group, cols, y);
    store_group(quantize_group(y), quantised, first_group + group);
  }
}

// A block's streams of its row. update(i): the update at columns i … i + 3. The norm has as many columns as
// all streams together.
template <typename Update>
__device__ __forceinline__ void inject_row(const StreamRows& streams, const OwnStreams& own,
                                           const Update& update, const Norm& norm, const NormOutputs& out) {
  __shared__ float weights[max_streams];
  const int64_t row = blockIdx.x, begin = row * norm.cols + own.first_column;
  const int size = own.size, num_streams = streams.num_streams, first = blockIdx.y * own.count;
  if (streams.x && threadIdx.x < own.count) {
    const float logit = streams.injection[row * num_streams + first + threadIdx.x];
    weights[threadIdx.x] = 2.0f * exact_sigmoid(logit / float(num_streams));
  }
  __syncthreads();
  for (int i = 4 * threadIdx.x; i < size; i += 4 * blockDim.x) {
    const float4 added = update(i);
    for (int c = 0; c < own.count; c++) {
      const int at = c * size + i;
      float4 v = added;
      if (streams.x) v = fma_four(weights[c], added, load_four<true>(streams.x + begin, at, own.norm.cols));
      store_four<true>(streams.sum + begin, at, own.norm.cols, v);
      dynamic_shared[at / 4] = v;
    }
  }
  __syncthreads();
  norm_streams_of_row(own, norm, out);
}

// The norms of streams alone. grid (rows, parts of the streams); dynamic shared memory: 4 bytes for a value
// of a part, padded. As all kernels of norms here.
__global__ void __launch_bounds__(max_threads)
    norm_stream_rows(const float* x, int num_streams, int size, Norm norm, NormOutputs out) {
  const OwnStreams own(num_streams, size, norm);
  wait_for_previous_grid();
  release_next_grid();
  const float* row = x + int64_t(blockIdx.x) * norm.cols + own.first_column;
  for (int i = 4 * threadIdx.x; i < own.norm.cols; i += 4 * blockDim.x)
    dynamic_shared[i / 4] = load_four<true>(row, i, own.norm.cols);
  __syncthreads();
  norm_streams_of_row(own, norm, out);
}

// With an update [rows, size].
__global__ void __launch_bounds__(max_threads)
    inject_norm_rows(StreamRows streams, const float* update, Norm norm, NormOutputs out) {
  const OwnStreams own(streams.num_streams, streams.size, norm);
  wait_for_previous_grid();
  release_next_grid();
  const float* row = update + int64_t(blockIdx.x) * streams.size;
  const auto at = [&](int i) { return load_four<true>(row, i, streams.size); };
  inject_row(streams, own, at, norm, out);
}

// The same with the sum of the experts as update.
template <SharedExpert kind>
__global__ void __launch_bounds__(max_threads)
    inject_experts_norm_rows(StreamRows streams, const float* routed, const float* topk_weights,
                             int num_ranks, const float* shared, const float* shared_gate, const int* cpu_ids,
                             float* cpu_rows, const __grid_constant__ Answer answer, LayerStamps* stamps,
                             Norm norm, NormOutputs out) {
  ExpertWait wait(cpu_ids, num_ranks, stamps);
  const OwnStreams own(streams.num_streams, streams.size, norm);
  wait_for_previous_grid();
  release_next_grid();
  wait.begin(answer);
  const Experts experts = experts_of_block(routed, topk_weights, num_ranks, shared, shared_gate,
                                           wait.is_waiting ? cpu_ids : nullptr, cpu_rows, streams.size);
  const auto at = [&](int i) { return combine_experts<true, kind>(experts, i, streams.size); };
  inject_row(streams, own, at, norm, out);
  wait.end();
}

// silu(x / divisor) of rows, as floats and quantised: a warp for each group of 256 columns. grid (rows,
// groups / warps).
template <bool aligned>
__global__ void __launch_bounds__(max_threads)
    scaled_silu_rows(const float* x, float divisor, int cols, int padded, NormOutputs out) {
  wait_for_previous_grid();
  release_next_grid();
  const int group = (blockIdx.y * blockDim.x + threadIdx.x) / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  const Eight v = load_eight<aligned>(x + row * cols, group, cols);
  const float result[8] = {exact_silu(v.low.x / divisor),  exact_silu(v.low.y / divisor),
                           exact_silu(v.low.z / divisor),  exact_silu(v.low.w / divisor),
                           exact_silu(v.high.x / divisor), exact_silu(v.high.y / divisor),
                           exact_silu(v.high.z / divisor), exact_silu(v.high.w / divisor)};
  store_eight<aligned>(out.y + row * cols, group, cols, result);
  store_group(quantize_group(result), quant_row(out.q, out.scales, out.sums, row, padded), group);
}

// gates · normed + sum, of which the gates are opened.
__device__ __forceinline__ float4 add_gated(float4 gates, float4 normed, float4 sum) {
  return {
      __fmaf_rn(exact_sigmoid(gates.x), normed.x, sum.x), __fmaf_rn(exact_sigmoid(gates.y), normed.y, sum.y),
      __fmaf_rn(exact_sigmoid(gates.z), normed.z, sum.z), __fmaf_rn(exact_sigmoid(gates.w), normed.w, sum.w)};
}

// The mean of the gated streams of rows [rows, streams · size], as floats and quantised: a warp for each
// group of 256 columns of the mean. grid (rows, groups / warps).
__global__ void __launch_bounds__(max_threads)
    mix_stream_rows(const float* normed, const float* gates, int num_streams, int size, int padded,
                    NormOutputs out) {
  wait_for_previous_grid();
  release_next_grid();
  const int group = (blockIdx.y * blockDim.x + threadIdx.x) / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  Eight sum = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 4
  for (int c = 0; c < num_streams; c++) {  // whose loads are under way together
    const int64_t begin = (row * num_streams + c) * size;
    const Eight x = load_eight<true>(normed + begin, group, size);
    const Eight gate = load_eight<true>(gates + begin, group, size);
    sum = {add_gated(gate.low, x.low, sum.low), add_gated(gate.high, x.high, sum.high)};
  }
  const float count = float(num_streams);
  const float mean[8] = {sum.low.x / count,  sum.low.y / count,  sum.low.z / count,  sum.low.w / count,
                         sum.high.x / count, sum.high.y / count, sum.high.z / count, sum.high.w / count};
  store_eight<true>(out.y + row * size, group, size, mean);
  store_group(quantize_group(mean), quant_row(out.q, out.scales, out.sums, row, padded), group);
}
