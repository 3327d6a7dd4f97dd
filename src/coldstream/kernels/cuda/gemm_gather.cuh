// The warps that copy blocks of 32 or 64 one by one, in the order in which the final tree needs their
// accumulators: accumulator j has the blocks of 32 with index mod 8 = j. A leaf has the blocks of
// accumulators j and j + 4 alternating, j first. A stage has the next eight of that order, of one leaf or
// several; each leaf's begin at an even place.
#pragma once

#include "cuda/gemm_copies.cuh"

namespace coldstream::gemm {

using BlockWalk = Walk<4>;

constexpr int small_block = 32;  // inputs that have a product of their own

// Where the bytes of block `block` of 32 begin in its row; a block of 64 has two of them.
template <class Weights>
__device__ constexpr int block_begin(int block) {
  return block / (Weights::elements / small_block) * Weights::bytes;
}

// Of the words of a block that belong to activation rows (scales, sums of codes), those that one lane of a
// product needs are together: rows 2t and 2t + 1 of every eight.
template <class T>
__device__ constexpr int word_place(int token) {
  return token % 8 / 2 * (T::tokens / 4) + token / 8 * 2 + token % 2;
}

// Job says where rows are.
template <class T, class Job>
struct BlockCopier {
  using Weights = typename T::Weights;
  static constexpr int code_tokens = copying_threads / chunks;  // in a pass, and as many weight rows
  static constexpr int code_passes = T::tokens / code_tokens;
  static constexpr int weight_passes = T::rows / code_tokens;
  static constexpr int windows = block_room<Weights> / copy_bytes;
  static_assert(T::tokens % (2 * code_tokens) == 0 && T::rows % code_tokens == 0);
  static_assert(chunks == 2 * stage_blocks && T::rows <= copying_threads);
  // A block reaches into the second of its windows, wherever it begins, but never into a fourth.
  static_assert(Weights::bytes > copy_bytes && windows <= 3);

  const Job& job;
  const uint32_t shared;
  const int lane = threadIdx.x - T::multiplying_threads;
  // This thread's share of a stage: half of one block, of every eighth row.
  const int first_row = lane / chunks, entry = lane % chunks / 2, half = lane % 2;
  int index = blockIdx.x;  // of the tile
  Source tile;
  BlockWalk position = {8, 0};      // the stage's first block; before a tile 8
  BlockWalk own;                    // of this thread's block
  const uint8_t* weights[2];        // the tile's first row in the matrices of even and of odd eights of rows
  int offset;                       // of weight row `lane` in its window
  uint32_t code_rows[code_passes];  // offsets of activation rows

  __device__ BlockCopier(const Job& job, uint32_t shared) : job(job), shared(shared) {}

  __device__ void run() {
    uint32_t stage = shared;
    for (int phase = 1;; stage += T::stage_bytes) {
      if (stage == shared + T::stages * T::stage_bytes) {
        stage = shared;
        phase ^= 1;
      }
      if (position.leaf == 8) open();
      const BlockWalk following = choose_block();
      int sums[code_passes / 2];
      if constexpr (Weights::has_mins) load_sums(sums);
      wait_barrier(stage + T::empty_at, phase);
      if (lane == 0) store_shared_16(stage, tile.head.count, tile.head.first, tile.head.row, 0);
      if (tile.head.count > 0) {
        if (lane < T::rows) store_shared_4(stage + T::offsets_at + 4 * lane, offset);
        if (own.leaf < 8) {
          copy_weights(stage);
          copy_activations(stage);
        }
        if constexpr (Weights::has_mins) store_sums(stage, sums);
      }
      arrive_after_copies(stage + T::full_at);
      arrive_barrier(stage + T::full_at);
      if (tile.head.count == 0) return;
      position = following;
    }
  }

 private:
  __device__ void open() {
    tile = job.template open<T>(index);
    index += gridDim.x;
    position = {};
    if (tile.head.count == 0) return;
#pragma unroll
    for (int k = 0; k < 2; k++)
      weights[k] =
          job.template weight_matrix<T>(tile, k * code_tokens) + int64_t(tile.head.row) * job.row_bytes;
    offset = int(reinterpret_cast<uint64_t>(start_of_row<T>(job, tile, lane))) & (copy_bytes - 1);
#pragma unroll
    for (int i = 0; i < code_passes; i++) {
      const int token = min(code_tokens * i + first_row, tile.head.count - 1);
      code_rows[i] = uint32_t(job.activation_row(tile.head.first + token)) * job.x.num_groups * group_size;
    }
  }

  // Sets `own` and returns the first block of the next stage.
  __device__ BlockWalk choose_block() {
    if constexpr (T::num_sums == 8) {
      const int block = position.group + entry;
      own = block < job.num_blocks ? BlockWalk{0, block} : BlockWalk{8, 0};
      return position.next_eight(job.num_blocks);
    }
    BlockWalk walk = position;
    own = {8, 0};
    for (int first = 0; first < stage_blocks && walk.leaf < 8;) {
      const int count = min(walk.rest_of_leaf(job.num_blocks), stage_blocks - first);
      if (entry >= first && entry < first + count) own = {walk.leaf, walk.group + 4 * (entry - first)};
      first += round_up(count, 2);
      walk = walk.after(count, job.num_blocks);
    }
    return walk;
  }

  __device__ void copy_weights(uint32_t stage) {
    const uint32_t to =
        stage + T::weights_at + first_row * T::weight_pitch + entry * block_room<Weights> + half * copy_bytes;
    const int64_t begin = block_begin<Weights>(own.group) + half * copy_bytes;
    const uint64_t from[2] = {reinterpret_cast<uint64_t>(weights[0] + begin),
                              reinterpret_cast<uint64_t>(weights[1] + begin)};
#pragma unroll 4
    for (int i = 0; i < weight_passes; i++) {
      // The aligned windows of 16 bytes that hold at least one of the block's.
      const int row = job.template weight_row<T>(tile, i * code_tokens + first_row) - tile.head.row;
      const uint64_t at = from[i % 2] + uint32_t(row * job.row_bytes);
      const uint8_t* window = reinterpret_cast<const uint8_t*>(at & ~uint64_t(copy_bytes - 1));
      const uint32_t to_row = to + i * code_tokens * T::weight_pitch;
      copy_if_below(1, 0, to_row, window);
      if constexpr (windows == 3)
        copy_if_below(int(at % copy_bytes) + Weights::bytes, (half + 2) * copy_bytes, to_row + 2 * copy_bytes,
                      window + 2 * copy_bytes);
    }
  }

  __device__ uint32_t word_at(int token) const { return 4 * (entry * T::tokens + word_place<T>(token)); }

  // The passes of codes have a thread's tokens; those of words half of them.
  __device__ int word_token(int i) const { return code_tokens * (2 * i + half) + first_row; }
  __device__ uint32_t word_of(int i) const {
    return (half ? code_rows[2 * i + 1] : code_rows[2 * i]) / small_block + own.group;
  }

  // The sums of the codes of this thread's block.
  __device__ void load_sums(int (&sums)[code_passes / 2]) const {
    if (tile.head.count == 0) return;
#pragma unroll
    for (int i = 0; i < code_passes / 2; i++) sums[i] = reinterpret_cast<const int*>(job.x.sums)[word_of(i)];
  }

  __device__ void store_sums(uint32_t stage, const int (&sums)[code_passes / 2]) const {
#pragma unroll
    for (int i = 0; i < code_passes / 2; i++) {
      const float sum = float(int16_t(sums[i]) + (sums[i] >> 16));
      store_shared_4(stage + T::sums_at + word_at(word_token(i)), __float_as_int(sum));
    }
  }

  __device__ void copy_activations(uint32_t stage) {
    const int8_t* const q = job.x.q + own.group * small_block + half * copy_bytes;
    const int count = tile.head.count;
    const uint32_t to = stage + T::codes_at + T::code_place(first_row, lane % chunks);
    constexpr int pass_bytes = T::code_place(code_tokens, 0);
    static_assert(code_tokens == swizzled_rows);
#pragma unroll
    for (int i = 0; i < code_passes; i++)
      copy_if_below(count, code_tokens * i + first_row, to + i * pass_bytes, q + code_rows[i]);
#pragma unroll
    for (int i = 0; i < code_passes / 2; i++)
      copy_word_if_below(count, word_token(i), stage + T::scales_at + word_at(word_token(i)),
                         job.x.scales + word_of(i));
  }
};

}  // namespace coldstream::gemm
