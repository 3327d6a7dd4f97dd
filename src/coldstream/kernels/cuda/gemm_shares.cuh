// Products with blocks of 32 or 64 by four warpgroups. They share the inputs of a tile: of every eight blocks
// warpgroup w takes blocks w and w + 4, so that it has accumulators w and w + 4 of all outputs. So blocks are
// copied in the order of memory, and the accumulators meet only at the end of a tile.
#pragma once

#include "cuda/gemm_blocks.cuh"

namespace coldstream::gemm {

// A tile of 64 rows * 64 tokens, of which each warpgroup has all outputs.
template <class Weights_, int stages_>
struct ShareTiling {
  using Weights = Weights_;
  static constexpr bool shares = true, by_warpgroups = true;
  static constexpr int stages = stages_, blocks = 1, sharers = 4;
  static constexpr int rows = 64, nt = 8, tokens = 8 * nt;
  static constexpr int warps = 4 * sharers;  // that multiply
  static constexpr int multiplying_threads = warp_size * warps;
  static constexpr int threads = multiplying_threads + copying_threads;
  static constexpr int copying_registers = 32, multiplying_registers = 112;

  static constexpr int stage_blocks = 16;  // of 32 inputs
  static constexpr int stage_codes = stage_blocks * small_block;
  static constexpr int stage_row_bytes = stage_codes / Weights::elements * Weights::bytes;
  // The aligned windows of a row; an odd number from row to row, so that the same word of eight rows lies in
  // different banks.
  static constexpr int row_bytes = round_up(stage_row_bytes + copy_bytes - Weights::alignment, copy_bytes);
  static constexpr int weight_pitch = row_bytes | copy_bytes;
  // From block to block of words that belong to tokens (scales, sums of codes).
  static constexpr int word_pitch = 4 * (tokens + 4);

  static constexpr int full_at = 16, empty_at = 24;  // barriers, after the header
  static constexpr int scales_at = 32;
  static constexpr int offsets_at = scales_at + stage_blocks * word_pitch;
  static constexpr int sums_at = offsets_at + 4 * rows;
  static constexpr int sums_end = sums_at + (Weights::has_mins ? stage_blocks * word_pitch : 0);
  static constexpr int codes_at = round_up(sums_end, swizzle_bytes);
  static constexpr int weights_at = codes_at + stage_codes * tokens;
  static constexpr int stage_bytes = round_up(weights_at + weight_pitch * rows, swizzle_bytes);
  // The sums of all warpgroups, and the barrier that says when they have been read.
  static constexpr int exchange_at = stages * stage_bytes;
  static constexpr int read_at = exchange_at + sharers * 4 * rows * tokens;
  // Of the tile that is copied: its header, the addresses of weight rows, the first groups of activation
  // rows.
  static constexpr int head_at = read_at + 16, addresses_at = head_at + 16,
                       groups_at = addresses_at + 8 * rows;
  static constexpr int shared_bytes = groups_at + 4 * tokens;

  static_assert(stage_row_bytes % copy_bytes == 0);  // a row begins at the same place in all windows

  __device__ static constexpr int code_place(int token, int chunk) {
    return swizzled_place<tokens>(token, chunk);
  }
  // Among the words of a block those that one lane needs are together: tokens 2t and 2t + 1 of two eights.
  __device__ static constexpr int word_place(int token) {
    return 4 * (token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2);
  }
};

// The warps that copy. Job says where rows are.
template <class T, class Job>
struct ShareCopier {
  using Weights = typename T::Weights;
  static constexpr int row_lanes = 8, pass_rows = copying_threads / row_lanes;
  static constexpr int row_windows = T::row_bytes / copy_bytes;
  static constexpr int group_blocks = group_size / small_block;
  static constexpr int code_parts = T::stage_codes / swizzled_row_bytes;
  static_assert(2 * T::tokens == copying_threads && T::rows == T::tokens);
  static_assert(pass_rows % swizzled_rows == 0);

  const Job& job;
  uint8_t* const shared;
  const uint32_t lane = threadIdx.x - T::multiplying_threads;
  int index = blockIdx.x;  // of the tile
  int block = 0;           // the stage's first
  int count;               // of the tile's activation rows; 0: there are no more tiles

  __device__ ShareCopier(const Job& job, uint8_t* shared) : job(job), shared(shared) {}

  __device__ void run() {
    const uint32_t first = shared_address(shared);
    uint32_t stage = first;
    for (int phase = 1;; stage += T::stage_bytes) {
      if (stage == first + T::stages * T::stage_bytes) {
        stage = first;
        phase ^= 1;
      }
      if (block == 0) open();
      wait_barrier(stage + T::empty_at, phase);
      if (block == 0) announce(stage);
      if (count > 0) {
        copy_weights(stage);
        copy_codes(stage);
        copy_words(stage);
      }
      arrive_after_copies(stage + T::full_at);
      arrive_barrier(stage + T::full_at);
      if (count == 0) return;
      block += T::stage_blocks;
      if (block >= job.num_blocks) block = 0;
    }
  }

 private:
  __device__ uint64_t* addresses() const { return reinterpret_cast<uint64_t*>(shared + T::addresses_at); }
  __device__ uint32_t* groups() const { return reinterpret_cast<uint32_t*>(shared + T::groups_at); }

  __device__ void open() {
    const Source tile = job.template open<T>(index);
    index += gridDim.x;
    count = tile.head.count;
    meet_at<copying_threads>(2);  // all have copied the tile before
    if (lane == 0) *reinterpret_cast<Header*>(shared + T::head_at) = tile.head;
    if (lane < T::rows && count > 0) {
      addresses()[lane] = reinterpret_cast<uint64_t>(start_of_row<T>(job, tile, lane));
      // Of the last row of the tile for what is beyond it.
      const int token = tile.head.first + min(int(lane), count - 1);
      groups()[lane] = uint32_t(job.activation_row(token)) * job.x.num_groups;
    }
    meet_at<copying_threads>(2);
  }

  // Of a tile's first stage, what is the same in all of them.
  __device__ void announce(uint32_t stage) const {
    const Header& head = *reinterpret_cast<const Header*>(shared + T::head_at);
    if (lane == 0) store_shared_16(stage, head.count, head.first, head.row, 0);
    if (lane < T::rows) store_shared_4(stage + T::offsets_at + 4 * lane, int(addresses()[lane] % copy_bytes));
  }

  // Whether the stage has blocks of a second group.
  __device__ bool has_second() const { return block + group_blocks < job.num_blocks; }

  __device__ void copy_weights(uint32_t stage) const {
    constexpr int part_blocks = Weights::elements / small_block;
    const int part = int(lane % row_lanes) * copy_bytes;
    const int bytes = min(T::stage_blocks, job.num_blocks - block) / part_blocks * Weights::bytes;
    const int skipped = block / part_blocks * Weights::bytes;
#pragma unroll 1
    for (int row = int(lane / row_lanes); row < T::rows; row += pass_rows) {
      const uint64_t at = addresses()[row] + skipped;
      // The aligned windows that hold at least one of the row's bytes.
      const uint8_t* from = reinterpret_cast<const uint8_t*>(at & ~uint64_t(copy_bytes - 1)) + part;
      const int end = int(at % copy_bytes) + bytes;
      const uint32_t to = stage + T::weights_at + row * T::weight_pitch + part;
#pragma unroll
      for (int k = 0; k < row_windows; k += row_lanes)
        copy_if_below(end, part + k * copy_bytes, to + k * copy_bytes, from + k * copy_bytes);
    }
  }

  __device__ void copy_codes(uint32_t stage) const {
    const int part = int(lane % row_lanes), second = has_second() ? count : 0;
    const int8_t* const q = job.x.q + block * small_block + part * copy_bytes;
    constexpr int part_bytes = T::code_place(0, row_lanes);
#pragma unroll 1
    for (int token = int(lane / row_lanes); token < T::tokens; token += pass_rows) {
      const int8_t* const from = q + groups()[token] * group_size;
      const uint32_t to = stage + T::codes_at + T::code_place(token, part);
#pragma unroll
      for (int k = 0; k < code_parts; k++)
        copy_if_below(k < code_parts / 2 ? count : second, token, to + k * part_bytes,
                      from + k * swizzled_row_bytes);
    }
  }

  // Scales and sums of a token for blocks 4 h … 4 h + 3 of each eight, h = lane % 2.
  __device__ void copy_words(uint32_t stage) const {
    const uint32_t from = groups()[lane / 2] * group_blocks + block + lane % 2 * 4;
    const uint32_t to = stage + lane % 2 * 4 * T::word_pitch + T::word_place(int(lane / 2));
    const int num_groups = has_second() ? 2 : 1;
#pragma unroll 1
    for (int k = 0; k < num_groups; k++) {
      const uint32_t group_from = from + k * group_blocks, group_to = to + k * group_blocks * T::word_pitch;
      store_words(group_to + T::scales_at, *reinterpret_cast<const float4*>(job.x.scales + group_from));
      if constexpr (Weights::has_mins) {
        const uint4 sums = *reinterpret_cast<const uint4*>(job.x.sums + 2 * group_from);
        store_words(group_to + T::sums_at,
                    make_float4(sum_of(sums.x), sum_of(sums.y), sum_of(sums.z), sum_of(sums.w)));
      }
    }
  }

  // Of two int16.
  __device__ static float sum_of(uint32_t pair) { return float(int16_t(pair) + (int(pair) >> 16)); }

  // Of four blocks.
  __device__ static void store_words(uint32_t to, const float4& words) {
    const float each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) store_shared_4(to + i * T::word_pitch, __float_as_int(each[i]));
  }
};

// The warpgroup's share of a tile: the sums of accumulators w and w + 4.
template <class T>
struct Share {
  using Weights = typename T::Weights;
  using Bytes = ShiftedBytes<Weights::alignment>;
  // From one block of an accumulator pair to the next one.
  static constexpr int step = block_begin<Weights>(4);
  static_assert(step % 4 == 0);
  static constexpr bool prefetches = !Weights::has_mins;  // registers for the minima are missing

  float p[2][T::nt][4];
  int w;
  int places[2];  // of the first blocks of rows g and g + 8 in a stage
  int first_word;

  // At the beginning of a tile.
  __device__ __forceinline__ void open(const Fragment& at, const uint8_t* stage) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = at.row + 8 * h + at.g;
      places[h] = T::weights_at + row * T::weight_pitch + block_begin<Weights>(w) +
                  reinterpret_cast<const int*>(stage + T::offsets_at)[row];
    }
    first_word = at.t + w % (Weights::elements / small_block) * 8;
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < T::nt; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][n][i] = 0.0f;
  }

  // Adds `count` blocks of a stage, for `parts` times 8 * nt activation rows.
  template <int nt, int parts>
  __device__ __forceinline__ void add(const Fragment& at, const uint8_t* stage, int count) {
    const uint32_t codes = same_for_warp(shared_address(stage + T::codes_at)) + 2 * w;
    const uint8_t* const words = stage + w * T::word_pitch + 16 * at.t;
    BlockRows<Weights, false> rows = load(stage, 0);
#pragma unroll
    for (int k = 0; k < T::stage_blocks / T::sharers; k++) {
      if (k >= count) break;
      if (!prefetches && k > 0) rows = load(stage, k);
      BlockRows<Weights, false> next = rows;
#pragma unroll
      for (int part = 0; part < parts; part++) {
        int products[nt][4];
        begin_products();
        multiply_by_four<false>(
            products, rows.a,
            describe_swizzled_from(codes, (k * T::tokens + part * 8 * nt) * swizzled_row_bytes), false);
        commit_products();
        if (prefetches && part + 1 == parts && k + 1 < T::stage_blocks / T::sharers)
          next = load(stage, k + 1);
        const uint8_t* const own = words + T::sharers * k * T::word_pitch + 32 * part * nt;
        const float4 scales = load_words(own + T::scales_at);
        wait_for_products<0>();
        take_products(products);
        convert<nt>(rows, products, scales, own, p[k % 2] + part * nt);
      }
      rows = next;
    }
  }

 private:
  __device__ __forceinline__ BlockRows<Weights, false> load(const uint8_t* stage, int k) const {
    Bytes blocks[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t before = places[h] % 4;
      blocks[h] = {stage + (places[h] - before) + k * step, before};
    }
    return {blocks, first_word};
  }

  // Words of a lane's tokens 2t and 2t + 1 of two eights.
  __device__ __forceinline__ static float4 load_words(const uint8_t* words) {
    return *reinterpret_cast<const float4*>(words);
  }
  __device__ __forceinline__ static float2 of_eight(const float4& words, int n) {
    return n % 2 ? make_float2(words.z, words.w) : make_float2(words.x, words.y);
  }

  // Adds the products of a part, whose scales and sums are at `words`; the first scales are loaded.
  template <int nt, class Rows>
  __device__ __forceinline__ static void convert(const Rows& rows, const int (&products)[nt][4],
                                                 float4 scales, const uint8_t* words, float (*sums)[4]) {
    float4 code_sums;
#pragma unroll
    for (int n = 0; n < nt; n++) {
      if (n > 0 && n % 2 == 0) scales = load_words(words + T::scales_at + 32 * n);
      if (Weights::has_mins && n % 2 == 0) code_sums = load_words(words + T::sums_at + 32 * n);
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; i++) values[i] = float(products[n][i]);
      rows.add(values, of_eight(scales, n), of_eight(code_sums, n), sums[n]);
    }
  }
};

// Ends a tile: the warpgroups' sums meet in shared memory, where each adds those of a quarter of the tokens
// and stores them. `phase`: of the barrier that says when all have read those of the tile before.
template <class T, class Job>
__device__ __forceinline__ void end_shares(const Job& job, const Header& head, const Fragment& at,
                                           const Share<T>& own, uint8_t* shared, int phase) {
  constexpr int group_threads = 4 * warp_size, sharers = T::sharers;
  float4* const sums = reinterpret_cast<float4*>(shared + T::exchange_at) + threadIdx.x % group_threads;
  const uint32_t read = shared_address(shared) + T::read_at;
  wait_barrier(read, phase);
#pragma unroll
  for (int n = 0; n < T::nt; n++) {
    const float (&a)[4] = own.p[0][n];
    const float (&b)[4] = own.p[1][n];
    sums[(own.w * T::nt + n) * group_threads] =
        make_float4(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]);
  }
  meet_at<T::multiplying_threads>(1);
#pragma unroll 1
  for (int n = own.w * (T::nt / sharers); n < (own.w + 1) * (T::nt / sharers); n++) {
    float4 of[sharers];
#pragma unroll
    for (int w = 0; w < sharers; w++) of[w] = sums[(w * T::nt + n) * group_threads];
    const float y[4] = {(of[0].x + of[2].x) + (of[1].x + of[3].x), (of[0].y + of[2].y) + (of[1].y + of[3].y),
                        (of[0].z + of[2].z) + (of[1].z + of[3].z), (of[0].w + of[2].w) + (of[1].w + of[3].w)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = 8 * n + 2 * at.t + i;
      if (token < head.count)
        job.store(job.out_row(head.first + token), head.row, at.row + at.g, y[i], y[2 + i]);
    }
  }
  arrive_after_reads(read, at.lane);
}

// The warps that multiply.
template <class T, class Job>
__device__ __forceinline__ void multiply_shares(const Job& job, uint8_t* shared) {
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const Fragment at = {lane, lane / 4, lane % 4, warp % 4 * 16, 0};
  Share<T> own;
  own.w = __shfl_sync(all_lanes, warp / 4, 0);
  int offset = 0, phase = 0, tile_phase = 1;
  while (true) {
    Header head;
    for (int block = own.w; block < own.w + job.num_blocks; block += T::stage_blocks) {
      const uint8_t* stage = shared + offset;
      wait_barrier(shared_address(stage) + T::full_at, phase);
      if (block == own.w) {
        head = *reinterpret_cast<const Header*>(stage);
        if (head.count == 0) return;
        own.open(at, stage);
      }
      see_copies();
      const int count = (job.num_blocks - block + 3) / 4;
      if (head.count <= 16)
        own.template add<2, 1>(at, stage, count);
      else if (head.count <= 32)
        own.template add<4, 1>(at, stage, count);
      else
        own.template add<4, 2>(at, stage, count);
      arrive_after_reads(shared_address(stage) + T::empty_at, lane);
      offset += T::stage_bytes;
      if (offset == T::stages * T::stage_bytes) {
        offset = 0;
        phase ^= 1;
      }
    }
    end_shares<T>(job, head, at, own, shared, tile_phase);
    tile_phase ^= 1;
  }
}

}  // namespace coldstream::gemm
