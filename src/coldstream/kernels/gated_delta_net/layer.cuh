// The arguments of the gated DeltaNet's kernels, and the parts of its arithmetic outside the recurrence. D is
// the head size (32, 64 or 128). Channels of qkv: NK query heads, NK key heads, NV value heads of D each.
#pragma once

#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"

namespace coldstream {

constexpr int block_columns = 32;  // of a head's state, that one block advances

struct DeltaLayer {
  const float* conv_taps;       // [channels, taps], the last tap for the current token
  const float* a;               // [NV]
  const float* dt_bias;         // [NV]
  const float* norm;            // [D]
  const int32_t* key_head_ids;  // [NV]
  int num_key_heads, num_value_heads;
  float eps;
  int has_sigmoid_gate;  // of the output, in place of SiLU
};

struct DeltaRows {
  const float *qkv, *z, *alpha, *beta;  // z starts on 16 bytes in every row
  int qkv_stride, z_stride, alpha_stride, beta_stride;
  const int32_t* state_ids;  // −1 for a row of no sequence
  const int32_t* segments;   // rows of a sequence are adjacent
  // For draft trees, null where there are none: the row of the batch that a row follows (−1: the committed
  // state), and where its inputs are kept (−1: nowhere, the row of a chain).
  const int32_t *parents, *kept;
  float *kept_qkv, *kept_alpha, *kept_beta;  // [kept rows, channels], [kept rows, NV] twice
  int num_rows;

  __device__ bool is_of_tree(int row) const { return kept && kept[row] >= 0; }
  __device__ bool is_first(int row) const { return row == 0 || segments[row - 1] != segments[row]; }
  __device__ bool is_last(int row) const { return row == num_rows - 1 || segments[row + 1] != segments[row]; }
};

struct DeltaStates {
  float* conv_state;  // [states, taps − 1, channels]
  float* state;       // [states, NV, D, D], key dimension first
};

// Rows of NV · D results; y or q may be null. `padded`: NV · D rounded up to 256.
struct DeltaOutputs {
  float* y;
  int8_t* q;
  float* scales;
  int16_t* sums;
  int padded;
};

// decay and write strength of one token and head.
__device__ __forceinline__ float2 open_gates(float alpha, float beta, float a, float dt_bias) {
  return {exact_exp(a * exact_softplus(alpha + dt_bias)), exact_sigmoid(beta)};
}

// Σ x² of the D floats x by sixteen neighbouring lanes, in all of them.
template <int D>
__device__ __forceinline__ float head_sum_of_squares(const float* x) {
  float p = 0.0f;
#pragma unroll
  for (int i = 0; i < D; i += 16) {
    const float v = x[i + threadIdx.x % 16];
    p = __fmaf_rn(v, v, p);
  }
  return sum_of_sixteen_lanes(p, 1);
}

// The raw inputs of one channel that precede row `row` of a batch, the oldest first. Those that are not rows
// of the batch are the last ones of conv_state.
template <int num_taps>
__device__ __forceinline__ void load_history(const DeltaRows& rows, const DeltaStates& states, int row,
                                             int channel, int num_channels, float (&history)[num_taps - 1]) {
  const int state_id = rows.state_ids[row], segment = rows.segments[row];
  int in_batch = 0;
#pragma unroll
  for (int j = 1; j < num_taps; j++) {
    if (in_batch == j - 1 && row >= j && rows.segments[row - j] == segment) in_batch = j;
  }
  // Rows of no sequence (state −1) take any history: their results are not used.
  const float* kept = states.conv_state + int64_t(max(state_id, 0)) * (num_taps - 1) * num_channels + channel;
#pragma unroll
  for (int i = 0; i < num_taps - 1; i++) {
    const int back = num_taps - 1 - i;  // rows back from `row`
    history[i] = back <= in_batch ? rows.qkv[int64_t(row - back) * rows.qkv_stride + channel]
                                  : kept[int64_t(i + in_batch) * num_channels];
  }
}

// silu of the convolution at input x; appends x to the history.
template <int num_taps>
__device__ __forceinline__ float convolve(const float (&taps)[num_taps], float (&history)[num_taps - 1],
                                          float x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < num_taps - 1; i++) sum = __fmaf_rn(taps[i], history[i], sum);
  sum = __fmaf_rn(taps[num_taps - 1], x, sum);
#pragma unroll
  for (int i = 0; i < num_taps - 2; i++) history[i] = history[i + 1];
  history[num_taps - 2] = x;
  return exact_silu(sum);
}

// Eight neighbouring columns of a lane in a group of 256.
__device__ __forceinline__ Eight load_eight(const float* x) {
  return {*reinterpret_cast<const float4*>(x), *(reinterpret_cast<const float4*>(x) + 1)};
}

// A lane's share of the factors of a row's group of outputs: the norm's weights, and z, which open_factors
// replaces by silu(z), or by sigmoid(z).
struct OutputFactors {
  Eight weight, gate;
};

template <int D>
__device__ __forceinline__ OutputFactors load_factors(const DeltaLayer& layer, const float* z, int group) {
  const int lane = threadIdx.x % warp_size, first = group * group_elements + 8 * lane;
  OutputFactors factors = {load_eight(layer.norm + 8 * lane % D), {{0, 0, 0, 0}, {0, 0, 0, 0}}};
  if (first < layer.num_value_heads * D) factors.gate = load_eight(z + first);
  return factors;
}

__device__ __forceinline__ float open_gate(float z, bool is_sigmoid) {
  const float opened = exact_sigmoid(z);
  return is_sigmoid ? opened : z * opened;
}

__device__ __forceinline__ float4 open_four(float4 z, bool is_sigmoid) {
  return {open_gate(z.x, is_sigmoid), open_gate(z.y, is_sigmoid), open_gate(z.z, is_sigmoid),
          open_gate(z.w, is_sigmoid)};
}

__device__ __forceinline__ void open_factors(OutputFactors& factors, const DeltaLayer& layer) {
  const bool is_sigmoid = layer.has_sigmoid_gate != 0;
  factors.gate = {open_four(factors.gate.low, is_sigmoid), open_four(factors.gate.high, is_sigmoid)};
}

__device__ __forceinline__ float4 finish_four(float4 x, float scale, float4 weight, float4 gate) {
  return {x.x * scale * weight.x * gate.x, x.y * scale * weight.y * gate.y, x.z * scale * weight.z * gate.z,
          x.w * scale * weight.w * gate.w};
}

// A lane's columns of one row's group of 256, by a warp: RMS norm of each head of `raw` (256 floats in shared
// memory, zeros behind the last column) times the opened factors.
template <int D>
__device__ __forceinline__ Eight finished_columns(const float* raw, const OutputFactors& factors, float eps) {
  const int lane = threadIdx.x % warp_size;
  const int head = 8 * lane / D;  // of the lane's columns, within the group
  float scale = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 128 / D; pair++) {  // half a warp a head
    const float sum = head_sum_of_squares<D>(raw + (2 * pair + lane / 16) * D);
    const float found = inverse_sqrt(sum / float(D) + eps);
    const float other = __shfl_sync(all_lanes, found, head % 2 * 16);
    if (head / 2 == pair) scale = other;
  }
  const Eight x = load_eight(raw + 8 * lane);
  return {finish_four(x.low, scale, factors.weight.low, factors.gate.low),
          finish_four(x.high, scale, factors.weight.high, factors.gate.high)};
}

__device__ __forceinline__ GroupShare quantize_eight(const Eight& x) {
  const float y[8] = {x.low.x, x.low.y, x.low.z, x.low.w, x.high.x, x.high.y, x.high.z, x.high.w};
  return quantize_group(y);
}

// The end of one row's group of 256 columns by a warp.
template <int D>
__device__ __forceinline__ void finish_group(const float* raw, const OutputFactors& factors,
                                             const DeltaLayer& layer, int row, int group,
                                             const DeltaOutputs& out) {
  const int lane = threadIdx.x % warp_size, size = layer.num_value_heads * D;
  const int first = group * group_elements + 8 * lane;
  const Eight y = finished_columns<D>(raw, factors, layer.eps);
  if (out.y && first < size) {
    float4* to = reinterpret_cast<float4*>(out.y + int64_t(row) * size + first);
    to[0] = y.low;
    to[1] = y.high;
  }
  if (!out.q) return;
  store_group(quantize_eight(y), quant_row(out.q, out.scales, out.sums, row, out.padded), group);
}

// The group of 256 columns of a row of no sequence, zeros, by a warp.
template <int D>
__device__ __forceinline__ void clear_group(const DeltaLayer& layer, int row, int group,
                                            const DeltaOutputs& out) {
  const int size = layer.num_value_heads * D;
  const int first = group * group_elements + 8 * (threadIdx.x % warp_size);
  if (out.y && first < size) {
    float4* to = reinterpret_cast<float4*>(out.y + int64_t(row) * size + first);
    to[0] = to[1] = {0, 0, 0, 0};
  }
  const float zeros[8] = {};
  if (!out.q) return;
  store_group(quantize_group(zeros), quant_row(out.q, out.scales, out.sums, row, out.padded), group);
}

// Brings a row's group of raw outputs, written by other blocks, into `raw` by a warp.
__device__ __forceinline__ void fetch_group(const float* row, int group, int size, float* raw) {
  const int lane = threadIdx.x % warp_size, first = group * group_elements + 8 * lane;
  float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
  if (first < size) {
    low = __ldcg(reinterpret_cast<const float4*>(row + first));
    high = __ldcg(reinterpret_cast<const float4*>(row + first) + 1);
  }
  reinterpret_cast<float4*>(raw)[2 * lane] = low;
  reinterpret_cast<float4*>(raw)[2 * lane + 1] = high;
  __syncwarp();
}

}  // namespace coldstream
