// GEMM of float weights, y = x W^T: sixteen accumulators per output, p[i mod 16] = fma(x_i, w_i, ·).
//
// A warp owns two accumulators, eight apart, of all outputs of a tile. So its threads meet the same input at
// a time, one load brings four tokens or rows of it, and no other warp loads these. The sums of a tile's
// warps meet once, at its end.
#include "cuda/vectors.cuh"

using namespace coldstream;

extern __shared__ float4 dynamic_shared[];

constexpr int accumulators = 16, warp_sums = 2;  // of an output, and those that a warp owns
constexpr int warps = accumulators / warp_sums, threads = warps * warp_size;
constexpr int depth = 64, segment = 32;  // inputs of a stage, and those that a warp fetches of several rows
constexpr int token_threads = 4, row_threads = 8;  // of a warp, over a tile's outputs
constexpr int max_tile_columns = 16;               // of tokens, next to each other in the order of blocks

// Values as the file has them, and those of a word in float32.
struct Float32 {
  using Storage = uint32_t;
  static __device__ void unpack(uint32_t word, float (&values)[1]) { values[0] = __uint_as_float(word); }
};
struct Float16 {
  using Storage = uint16_t;
  static __device__ void unpack(uint32_t word, float (&values)[2]) {
    values[0] = half_to_float(uint16_t(word)), values[1] = half_to_float(uint16_t(word >> 16));
  }
};
struct Bfloat16 {
  using Storage = uint16_t;
  static __device__ void unpack(uint32_t word, float (&values)[2]) {
    values[0] = __uint_as_float(word << 16), values[1] = __uint_as_float(word & 0xffff0000u);
  }
};

// thread_side: tokens and rows of a thread. is_aligned: rows of x and of weights begin on 16 bytes and are
// whole such chunks.
template <class Weights_, int thread_side_, bool is_aligned_>
struct FloatTiling {
  using Weights = Weights_;
  static constexpr int thread_side = thread_side_;
  static constexpr bool is_aligned = is_aligned_;
  static constexpr int tile_tokens = token_threads * thread_side, tile_rows = row_threads * thread_side;
  static constexpr int blocks = thread_side > 4 ? 1 : 2;  // on a multiprocessor
  static_assert(thread_side % 4 == 0);
};

// What a block multiplies: x is [tokens, values] with x_stride floats between rows, w [rows, values] with
// adjacent rows; out [tokens, rows] has out_stride floats between rows.
struct FloatJob {
  const float* x;
  const void* w;
  float* out;
  int num_tokens, num_rows, num_values, x_stride, out_stride;
};

// A stage of `width` tokens or rows: those of an input are adjacent. A gap after every four inputs lets the
// threads that store different inputs of a row meet different banks.
template <int width>
struct Side {
  float values[depth * (width + 1)];
  // Bytes; of a sum of inputs they add up if one of them is a multiple of four.
  static __device__ uint32_t place(int input) { return 4 * (input * width + input / 4 * 4); }
};

template <class T>
struct Stage {
  Side<T::tile_tokens> x;
  Side<T::tile_rows> w;
};

// Chunks of 16 bytes of `width` rows that this thread brings to stages, one after the other.
template <class Format, int width, class T>
struct Fetched {
  using Storage = typename Format::Storage;
  static constexpr int word_values = 4 / sizeof(Storage), chunk = 4 * word_values;
  static constexpr int row_chunks = segment / chunk, rows_at_once = threads / row_chunks;
  static constexpr bool has_room = rows_at_once == 2 * width;  // for two segments
  static constexpr int passes = has_room ? 1 : width / rows_at_once;
  static constexpr int step = has_room ? 2 * segment : segment, steps = depth / step;
  static_assert(has_room || width % rows_at_once == 0);
  using Stored = Side<width>;

  const Storage* from[passes];  // of the next stage
  uint32_t words[steps][passes][4];
  uint32_t to;  // in shared memory, of the first pass in the first stage

  static __device__ int place() { return threadIdx.x / row_chunks; }  // among rows at once
  static __device__ int input() {
    return threadIdx.x % row_chunks * chunk + (has_room ? place() / width * segment : 0);
  }
  static __device__ int row(int pass) { return has_room ? place() % width : place() + pass * rows_at_once; }

  // Of rows with `stride` values between them, of which there are `count`; past the last one that again.
  __device__ Fetched(const void* rows, int64_t stride, int count, const float* stage) : words{} {
    to = in_register(shared_address(stage) + Stored::place(input()) + 4 * row(0));
#pragma unroll
    for (int i = 0; i < passes; i++)
      from[i] = static_cast<const Storage*>(rows) + min(row(i), count - 1) * stride + input();
  }

  // The next stage, from where rows have `left` inputs. What lies past their end is left as it is: nobody
  // reads sums of that.
  __device__ __forceinline__ void load(int left) {
#pragma unroll
    for (int i = 0; i < passes; i++) {
#pragma unroll
      for (int s = 0; s < steps; s++) load_chunk(from[i] + s * step, left - s * step - input(), words[s][i]);
      from[i] += depth;
    }
  }

  static __device__ __forceinline__ void load_chunk(const Storage* values, int count, uint32_t (&to)[4]) {
    if (T::is_aligned) {
      if (count <= 0) return;
      const uint4 chunk = *reinterpret_cast<const uint4*>(values);
      to[0] = chunk.x, to[1] = chunk.y, to[2] = chunk.z, to[3] = chunk.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i * word_values < count) to[i] = values[i * word_values];
      if (word_values == 2 && i * 2 + 1 < count) to[i] |= uint32_t(values[i * 2 + 1]) << 16;
    }
  }

  // shift: bytes from the first stage to this one.
  __device__ __forceinline__ void store(uint32_t shift) const {
#pragma unroll
    for (int i = 0; i < passes; i++)
#pragma unroll
      for (int s = 0; s < steps; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float values[word_values];
          Format::unpack(words[s][i][k], values);
#pragma unroll
          for (int j = 0; j < word_values; j++) {
            const uint32_t place = Stored::place(s * step) + Stored::place(k * word_values + j);
            store_shared_1(to + shift + place + 4 * i * rows_at_once, values[j]);
          }
        }
  }
};

// The part of a tile's outputs that a thread of a warp has: groups of four tokens and of four rows. Threads
// of a half warp that load the same are neighbours, or one apart.
__device__ __forceinline__ int first_thread_token(int thread) {
  return 4 * ((thread & 1) | (thread >> 3 & 2));
}
__device__ __forceinline__ int first_thread_row(int thread) { return 4 * (thread >> 1 & 7); }

// Groups of four that are `apart` floats apart.
template <int apart, int count>
__device__ __forceinline__ void load_fours(uint32_t from, float (&to)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += 4)
    load_shared_4(from + i * apart * 4, to[i], to[i + 1], to[i + 2], to[i + 3]);
}

template <class T>
using Sums = float[warp_sums][T::thread_side][T::thread_side];

// Inputs [begin, end) of a stage which has `count`. x, w: addresses of the warp's first input there. Inputs
// past the last are skipped, as adding 0 would turn a sum of −0 into 0; in a whole stage, loads need not wait
// for that decision.
template <bool is_whole, int begin, int end, class T>
__device__ __forceinline__ void add_inputs(uint32_t x, uint32_t w, int count, Sums<T>& p) {
  const int warp = threadIdx.x / warp_size;
#pragma unroll(is_whole ? (end - begin) / accumulators : 1)
  for (int step = begin; step < end; step += accumulators)
#pragma unroll
    for (int s = 0; s < warp_sums; s++) {
      const int input = step + s * warps;
      if (!is_whole && input + warp >= count) return;
      float of_x[T::thread_side], of_w[T::thread_side];
      load_fours<token_threads>(x + decltype(Stage<T>::x)::place(input), of_x);
      load_fours<row_threads>(w + decltype(Stage<T>::w)::place(input), of_w);
#pragma unroll
      for (int i = 0; i < T::thread_side; i++)
#pragma unroll
        for (int j = 0; j < T::thread_side; j++) p[s][i][j] = __fmaf_rn(of_x[i], of_w[j], p[s][i][j]);
    }
}

// Four rows of the sums of one token in a register each.
template <class T>
__device__ __forceinline__ float4 four_sums(const Sums<T>& p, int token, int row) {
  const auto sums = [&](int s) -> float4 {
    return {p[s][token][row], p[s][token][row + 1], p[s][token][row + 2], p[s][token][row + 3]};
  };
  return sums(0) + sums(1);
}

__device__ __forceinline__ float4 sum_of_warps(const float4* from, int stride) {
  float4 q[warps];
#pragma unroll
  for (int j = 0; j < warps; j++) q[j] = from[j * stride];
  return ((q[0] + q[4]) + (q[2] + q[6])) + ((q[1] + q[5]) + (q[3] + q[7]));
}

// The trees over the warps: they exchange the sums of four tokens of each thread at a time.
template <class T>
__device__ __forceinline__ void write_tile(const FloatJob& job, int first_token, int first_row,
                                           const Sums<T>& p) {
  constexpr int fours = T::thread_side / 4, slots = 4 * fours * warp_size;  // of a warp
  static_assert(warps * slots * sizeof(float4) <= 2 * sizeof(Stage<T>));
  const int warp = threadIdx.x / warp_size;
  const bool is_aligned = T::is_aligned && job.num_rows % 4 == 0 && job.out_stride % 4 == 0;
#pragma unroll
  for (int group = 0; group < T::thread_side; group += 4) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4 * fours; n++)
      dynamic_shared[warp * slots + n * warp_size + threadIdx.x % warp_size] =
          four_sums<T>(p, group + n / fours, n % fours * 4);
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += threads) {
      const float4 sum = sum_of_warps(dynamic_shared + slot, slots);
      const int n = slot / warp_size, thread = slot % warp_size;
      const int token = first_token + group * token_threads + first_thread_token(thread) + n / fours;
      const int row = first_row + n % fours * 4 * row_threads + first_thread_row(thread);
      if (token >= job.num_tokens || row >= job.num_rows) continue;
      float* const out = job.out + int64_t(token) * job.out_stride;
      if (is_aligned)
        store_four<true>(out, row, job.num_rows, sum);
      else
        store_four<false>(out, row, job.num_rows, sum);
    }
  }
}

// While a stage is multiplied the next one is stored, and the one after it fetched.
template <class T>
__global__ void __launch_bounds__(threads, T::blocks) float_gemm(const __grid_constant__ FloatJob job) {
  using Weight = typename T::Weights::Storage;
  const int first_token = (blockIdx.z * max_tile_columns + blockIdx.x) * T::tile_tokens;
  const int first_row = blockIdx.y * T::tile_rows;
  release_next_grid();
  wait_for_previous_grid();
  if (first_token >= job.num_tokens) return;
  Stage<T>& stage = *reinterpret_cast<Stage<T>*>(dynamic_shared);
  Fetched<Float32, T::tile_tokens, T> next_x(job.x + int64_t(first_token) * job.x_stride, job.x_stride,
                                             job.num_tokens - first_token, stage.x.values);
  Fetched<typename T::Weights, T::tile_rows, T> next_w(
      static_cast<const Weight*>(job.w) + int64_t(first_row) * job.num_values, job.num_values,
      job.num_rows - first_row, stage.w.values);
  const auto load = [&](int left) { next_x.load(left), next_w.load(left); };
  const auto store = [&](uint32_t shift) { next_x.store(shift), next_w.store(shift); };

  const int warp = threadIdx.x / warp_size, thread = threadIdx.x % warp_size;
  const uint32_t x =
      in_register(shared_address(stage.x.values + first_thread_token(thread)) + stage.x.place(warp));
  const uint32_t w =
      in_register(shared_address(stage.w.values + first_thread_row(thread)) + stage.w.place(warp));
  Sums<T> p = {};
  int count = job.num_values;
  load(count);
  store(0);
  load(count - depth);
  uint32_t shift = 0;
  for (; count >= depth; count -= depth) {
    constexpr int last = depth - accumulators;
    __syncthreads();
    add_inputs<true, 0, last, T>(x + shift, w + shift, count, p);
    store(sizeof(Stage<T>) - shift);
    load(count - 2 * depth);
    add_inputs<true, last, depth, T>(x + shift, w + shift, count, p);
    shift = sizeof(Stage<T>) - shift;
  }
  if (count > 0) {
    __syncthreads();
    add_inputs<false, 0, depth, T>(x + shift, w + shift, count, p);
  }
  write_tile<T>(job, first_token, first_row, p);
}
