// Gated causal attention. First all heads are normed, rotated and appended to the caches; then tiles of
// tokens attend, reading the caches only, so that a token finds the same keys whether its predecessors came
// with it or before it.
//
// Few rows: every chunk of positions is a task of its own, and a last stage merges them. Many rows: a task
// walks the chunks of its tile and merges as it goes. The order of the merges, and so every bit, is the same.
#include <algorithm>

#include "ops/float_ops.h"

namespace coldstream {

namespace {

constexpr int64_t ROWS_PER_TILE = 64;  // (token, query head) pairs that share the loads of a block
constexpr int64_t SPLIT_ROWS = 8;      // up to this many rows, chunks are apart
constexpr int64_t HEADS_PER_TASK = 8;

// Consecutive tokens of one slot.
struct token_tile {
  int32_t first_row, num_tokens;
};

class attention_op : public op {
 public:
  attention_op(const float_kernels& kernels, const attention_arguments& arguments)
      : kernels_(kernels),
        a_(arguments),
        group_(a_.num_heads / a_.num_kv_heads),
        tile_tokens_(std::max<int64_t>(1, ROWS_PER_TILE / group_)),
        row_floats_(attention_row_floats(a_.head_size)),
        max_chunks_((a_.num_positions + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK),
        tiles_(a_.capacity) {}

  const char* name() const override { return "attention"; }
  int num_stages() const override { return 3; }

  size_t scratch_bytes() const override {
    const int64_t rows = tile_tokens_ * group_;
    const int64_t attending = attention_memory_floats(rows, a_.head_size) + 2 * rows * row_floats_;
    return sizeof(float) * std::max(attending, head_floats(a_.head_size));
  }

  size_t shared_bytes() const override {
    const int64_t queries = a_.capacity * a_.num_heads * a_.head_size;
    const int64_t split_rows = std::min(a_.capacity, SPLIT_ROWS);
    return sizeof(float) * (queries + split_rows * a_.num_heads * max_chunks_ * row_floats_);
  }

  void run(int stage, int rows, worker& w) override {
    if (stage == 0) {
      if (w.index == 0) plan_tiles(rows);
      append_rows(rows, w);
    } else if (rows > SPLIT_ROWS) {
      if (stage == 1) attend_tiles(rows, w);
    } else if (stage == 1) {
      attend_chunks(rows, w);
    } else {
      merge_chunks(rows, w);
    }
  }

 private:
  const int32_t* positions() const { return a_.places.positions; }
  const int32_t* slots() const { return a_.places.slots; }

  // Shared memory: prepared queries [kv heads, rows, group, head_size], then partial results
  // [chunks, kv heads, rows, group, row_floats].
  float* query(const worker& w, int rows, int64_t kv_head, int64_t row) const {
    return reinterpret_cast<float*>(w.shared->data()) + (kv_head * rows + row) * group_ * a_.head_size;
  }
  float* partial(const worker& w, int rows, int64_t chunk, int64_t kv_head, int64_t row) const {
    float* base = query(w, rows, a_.num_kv_heads, 0);
    return base + ((chunk * a_.num_kv_heads + kv_head) * rows + row) * group_ * row_floats_;
  }
  const float* gate(int64_t row, int64_t head) const {
    return a_.query_gate.row(row) + (2 * head + 1) * a_.head_size;
  }

  int64_t cache_offset(int64_t slot, int64_t position, int64_t kv_head) const {
    return ((slot * a_.num_positions + position) * a_.num_kv_heads + kv_head) * a_.head_size;
  }
  void* cache_at(void* cache, int64_t offset) const {
    return static_cast<std::byte*>(cache) + offset * (a_.half_cache ? sizeof(float16) : sizeof(float));
  }

  void plan_tiles(int rows) {
    num_tiles_ = 0;
    for (int32_t row = 0; row < rows; row++) {
      const bool follows = row > 0 && slots()[row] == slots()[row - 1] &&
                           positions()[row] == int64_t{positions()[row - 1]} + 1;
      if (follows && tiles_[num_tiles_ - 1].num_tokens < tile_tokens_) {
        tiles_[num_tiles_ - 1].num_tokens++;
      } else {
        tiles_[num_tiles_++] = {row, 1};
      }
    }
  }

  void append_rows(int rows, worker& w) {
    const int64_t num_units = a_.num_heads + a_.num_kv_heads;
    const int64_t tasks_per_row = (num_units + HEADS_PER_TASK - 1) / HEADS_PER_TASK;
    for (int64_t task = w.take(); task < rows * tasks_per_row; task = w.take()) {
      const int64_t row = task / tasks_per_row;
      if (slots()[row] < 0 || slots()[row] >= a_.num_slots || positions()[row] < 0 ||
          positions()[row] >= a_.num_positions) {
        return w.fail("attention: a row's slot or position lies outside the caches");
      }
      const int64_t first = task % tasks_per_row * HEADS_PER_TASK;
      for (int64_t unit = first; unit < std::min(first + HEADS_PER_TASK, num_units); unit++) {
        if (unit < a_.num_heads) {
          prepare_query(rows, row, unit, w);
        } else {
          append_key_value(row, unit - a_.num_heads, w);
        }
      }
    }
  }

  void prepare_query(int rows, int64_t row, int64_t head, worker& w) {
    float* out = query(w, rows, head / group_, row) + head % group_ * a_.head_size;
    kernels_.rms_norm(a_.query_gate.row(row) + 2 * head * a_.head_size, a_.q_norm, a_.eps, out, a_.head_size);
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a_.head_size));
    kernels_.rope(out, a_.angles.row(row), a_.num_rope_pairs, scale, a_.head_size);
  }

  void append_key_value(int64_t row, int64_t kv_head, worker& w) {
    auto* key = reinterpret_cast<float*>(w.memory->data());
    kernels_.rms_norm(a_.key.row(row) + kv_head * a_.head_size, a_.k_norm, a_.eps, key, a_.head_size);
    kernels_.rope(key, a_.angles.row(row), a_.num_rope_pairs, 1.0f, a_.head_size);
    const int64_t offset = cache_offset(slots()[row], positions()[row], kv_head);
    store(key, cache_at(a_.k_cache, offset));
    store(a_.value.row(row) + kv_head * a_.head_size, cache_at(a_.v_cache, offset));
  }

  void store(const float* from, void* to) const {
    if (a_.half_cache) {
      kernels_.to_float16(from, static_cast<float16*>(to), a_.head_size);
    } else {
      std::copy_n(from, a_.head_size, static_cast<float*>(to));
    }
  }

  void attend(int rows, const token_tile& tile, int64_t kv_head, int64_t chunk, float* out, float* memory,
              worker& w) {
    const int64_t offset = cache_offset(slots()[tile.first_row], 0, kv_head);
    const attention_chunk work = {
        .q = query(w, rows, kv_head, tile.first_row),
        .num_tokens = tile.num_tokens,
        .group = group_,
        .head_size = a_.head_size,
        .first_position = positions()[tile.first_row],
        .begin = chunk * ATTENTION_CHUNK,
        .keys = cache_at(a_.k_cache, offset),
        .values = cache_at(a_.v_cache, offset),
        .position_stride = a_.num_kv_heads * a_.head_size,
        .rows = out,
        .memory = memory,
    };
    (a_.half_cache ? kernels_.attend_f16 : kernels_.attend_f32)(work);
  }

  int64_t last_chunk(int64_t row) const { return positions()[row] / ATTENTION_CHUNK; }
  int64_t last_chunk(const token_tile& tile) const {
    return last_chunk(tile.first_row + tile.num_tokens - 1);
  }

  void finish(const float* result, int64_t row, int64_t head) {
    kernels_.attend_finish(result, gate(row, head), a_.out.row(row) + head * a_.head_size, a_.head_size);
  }

  void attend_chunks(int rows, worker& w) {
    auto* memory = reinterpret_cast<float*>(w.memory->data());
    const int64_t num_units = num_tiles_ * a_.num_kv_heads;
    int64_t num_chunks = 0;
    for (int64_t i = 0; i < num_tiles_; i++) num_chunks = std::max(num_chunks, last_chunk(tiles_[i]) + 1);
    for (int64_t task = w.take(); task < num_units * num_chunks; task = w.take()) {
      const token_tile& tile = tiles_[task % num_units / a_.num_kv_heads];
      const int64_t chunk = task / num_units, kv_head = task % a_.num_kv_heads;
      if (chunk > last_chunk(tile)) continue;
      attend(rows, tile, kv_head, chunk, partial(w, rows, chunk, kv_head, tile.first_row), memory, w);
    }
  }

  void merge_chunks(int rows, worker& w) {
    for (int64_t task = w.take(); task < rows * a_.num_heads; task = w.take()) {
      const int64_t row = task / a_.num_heads, head = task % a_.num_heads;
      const int64_t kv_head = head / group_, offset = head % group_ * row_floats_;
      float* total = partial(w, rows, 0, kv_head, row) + offset;
      for (int64_t chunk = 1; chunk <= last_chunk(row); chunk++) {
        kernels_.attend_merge(total, partial(w, rows, chunk, kv_head, row) + offset, a_.head_size);
      }
      finish(total, row, head);
    }
  }

  void attend_tiles(int rows, worker& w) {
    const int64_t num_tasks = num_tiles_ * a_.num_kv_heads;
    for (int64_t task = w.take(); task < num_tasks; task = w.take()) {
      // Later tokens see more positions: the longest tasks first.
      const token_tile& tile = tiles_[num_tiles_ - 1 - task / a_.num_kv_heads];
      attend_tile(rows, tile, task % a_.num_kv_heads, w);
    }
  }

  void attend_tile(int rows, const token_tile& tile, int64_t kv_head, worker& w) {
    auto* totals = reinterpret_cast<float*>(w.memory->data());
    float* results = totals + tile_tokens_ * group_ * row_floats_;
    float* memory = results + tile_tokens_ * group_ * row_floats_;
    attend(rows, tile, kv_head, 0, totals, memory, w);
    for (int64_t chunk = 1; chunk <= last_chunk(tile); chunk++) {
      attend(rows, tile, kv_head, chunk, results, memory, w);
      for (int64_t token = 0; token < tile.num_tokens; token++) {
        if (last_chunk(tile.first_row + token) < chunk) continue;
        for (int64_t r = token * group_; r < (token + 1) * group_; r++) {
          kernels_.attend_merge(totals + r * row_floats_, results + r * row_floats_, a_.head_size);
        }
      }
    }
    for (int64_t r = 0; r < tile.num_tokens * group_; r++) {
      finish(totals + r * row_floats_, tile.first_row + r / group_, kv_head * group_ + r % group_);
    }
  }

  const float_kernels& kernels_;
  const attention_arguments a_;
  const int64_t group_, tile_tokens_, row_floats_, max_chunks_;
  std::vector<token_tile> tiles_;
  int64_t num_tiles_ = 0;
};

}  // namespace

std::unique_ptr<op> make_attention(const float_kernels& kernels, const attention_arguments& arguments) {
  return std::make_unique<attention_op>(kernels, arguments);
}

}  // namespace coldstream
