// Causal attention, with or without a gate of its output. First all heads are normed, rotated and appended to
// the caches; then tiles of tokens attend, reading the caches only, so that a token finds the same keys
// whether its predecessors came with it or before it.
//
// Up to split_rows rows: every chunk of positions is a task, and a last stage merges them. Beyond: a task
// walks the chunks of its tile and merges as it goes. The order of the merges, and so every bit, is the same.
// A task has all heads of its positions, if there are tasks enough, so that it reads memory in order. Workers
// take neighbouring chunks.
//
// A row of a draft tree sees the committed positions of its sequence and its own ancestors, which are not
// stored at their positions. From the chunk of the first of them on, its keys and values are gathered in
// order of position into the worker's memory, and the same kernel runs over that.
#include <algorithm>
#include <cstring>

#include "ops/cache_places.h"

namespace coldstream {

namespace {

constexpr int64_t rows_per_tile = 128;  // (token, query head) pairs that share the loads of a block
constexpr int64_t most_tile_tokens = 64;
constexpr int64_t split_rows = 8;  // most rows whose chunks are separate tasks
constexpr int64_t heads_per_task = 8;
constexpr int64_t tasks_per_worker = 4;  // at least, if there are as many heads
constexpr int64_t state_floats = sizeof(SoftmaxState) / sizeof(float);

// Consecutive tokens of one sequence, or some rows of a tree.
struct TokenTile {
  int32_t first_row, num_tokens;
  int32_t first_position;             // of the first token; in a tree, how many positions are committed
  int32_t gathered_from, num_chunks;  // chunks from the first of these on are gathered, row by row
  int32_t first_chunk;                // that some row sees
  int32_t last_start;                 // the greatest of the rows' first positions
};

// A chunk of positions of some key/value heads, for the tokens of a tile, of so many rows of the step.
struct ChunkTask {
  const TokenTile* tile;
  int64_t chunk, first_head, num_heads;
  int rows;
};

class AttentionOp : public Op {
 public:
  AttentionOp(const FloatKernels& kernels, const AttentionArguments& arguments)
      : kernels_(kernels),
        cache_(kernels.caches[static_cast<int>(arguments.type)]),
        a_(arguments),
        places_{a_.layout, a_.num_pieces, a_.num_positions},
        group_(a_.num_heads / a_.num_kv_heads),
        tile_tokens_(std::clamp<int64_t>(rows_per_tile / group_, 1, most_tile_tokens)),
        row_floats_(attention_row_floats(a_.head_size)),
        query_ints_(is_integer() ? integer_query_ints(a_.head_size) : a_.head_size),
        cache_row_(cache_row_elements(a_.type, a_.head_size)),
        max_chunks_((places_.max_positions() + attention_chunk - 1) / attention_chunk),
        tiles_(a_.capacity) {}

  const char* name() const override { return "attention"; }
  int num_stages() const override { return 3; }

  size_t scratch_bytes() const override {
    const int64_t gathered = a_.layout.in_batch() ? 2 * gathered_bytes() : 0;
    return sizeof(float) * std::max(attending_floats(), head_floats(a_.head_size)) + gathered;
  }

  size_t shared_bytes() const override {
    const int64_t queries = a_.capacity * a_.num_heads * query_ints_;
    const int64_t most_rows = std::min(a_.capacity, split_rows);
    return sizeof(float) * (queries + most_rows * a_.num_heads * max_chunks_ * row_floats_);
  }

  bool runs_alone(int stage, int rows) const override {
    if (stage == 1) return false;
    if (stage == 2 && rows > split_rows) return true;  // without work
    return rows * (a_.num_heads + a_.num_kv_heads) * a_.head_size <= small_work / 4;
  }

  void run(int stage, int rows, Worker& w) override {
    if (stage == 0) {
      if (w.index == 0) plan_tiles(rows, w);
      append_rows(rows, w);
    } else if (rows > split_rows) {
      if (stage == 1) attend_tiles(rows, w);
    } else if (stage == 1) {
      attend_chunks(rows, w);
    } else {
      merge_chunks(rows, w);
    }
  }

 private:
  const int32_t* positions() const { return a_.layout.positions; }
  const BatchLayout& batch() const { return a_.layout.batch; }

  // Private memory: of the tile that attends, then the gathered keys and the gathered values of one row.
  int64_t attending_floats() const {
    const int64_t rows = tile_tokens_ * group_;
    return attention_memory_floats(a_.type, rows, a_.head_size) +
           a_.num_kv_heads * rows * (row_floats_ + state_floats);
  }
  bool is_integer() const { return code_bits(a_.type) != 0; }
  int64_t element_bytes() const {
    return is_integer() ? 1 : a_.type == CacheType::f16 ? sizeof(Float16) : sizeof(float);
  }
  int64_t gathered_bytes() const { return attention_chunk * cache_row_ * element_bytes(); }

  // Shared memory: prepared queries [kv heads, rows, group, query_ints], then partial results
  // [chunks, kv heads, rows, group, row_floats].
  int32_t* query(const Worker& w, int rows, int64_t kv_head, int64_t row) const {
    return reinterpret_cast<int32_t*>(w.shared->data()) + (kv_head * rows + row) * group_ * query_ints_;
  }
  float* partial(const Worker& w, int rows, int64_t chunk, int64_t kv_head, int64_t row) const {
    auto* base = reinterpret_cast<float*>(query(w, rows, a_.num_kv_heads, 0));
    return base + ((chunk * a_.num_kv_heads + kv_head) * rows + row) * group_ * row_floats_;
  }
  HeadGate gate(int64_t row, int64_t head) const {
    switch (a_.output_gate) {
      case OutputGate::query:
        return {a_.output_gate, a_.query_gate.row(row) + (2 * head + 1) * a_.head_size};
      case OutputGate::head:
        return {a_.output_gate, a_.gate.row(row) + head};
      case OutputGate::element:
        return {a_.output_gate, a_.gate.row(row) + head * a_.head_size};
      default:
        return {OutputGate::none, nullptr};
    }
  }

  // In elements, of an index in the sequence of `row`.
  int64_t cache_offset(int64_t row, int64_t index, int64_t kv_head) const {
    return (places_.place(row, index) * a_.num_kv_heads + kv_head) * cache_row_;
  }
  void* cache_at(void* cache, int64_t offset) const {
    return static_cast<std::byte*>(cache) + offset * element_bytes();
  }

  void plan_tiles(int32_t rows, Worker& w) {
    num_tiles_ = 0;
    // Smaller tiles if the workers would have too few of them.
    const bool is_smaller = w.count > 1 && rows > split_rows &&
                            rows * a_.num_kv_heads < tasks_per_worker * w.count * tile_tokens_;
    planned_tokens_ = is_smaller ? (tile_tokens_ + 1) / 2 : tile_tokens_;
    for (int32_t first = 0, end; first < rows; first = end) {
      end = group_end(a_.layout, first, rows);
      if (a_.layout.in_batch()) {
        if (const char* fault = places_.segment_fault(first, end)) return w.fail(fault);
      }
      a_.layout.in_tree(first) ? plan_tree(first, end) : plan_chain(first, end);
    }
  }

  void plan_chain(int32_t first, int32_t end) {
    for (int32_t row = first; row < end; row++) {
      const bool follows = row > first && positions()[row] == int64_t{positions()[row - 1]} + 1;
      if (follows && tiles_[num_tiles_ - 1].num_tokens < planned_tokens_) {
        tiles_[num_tiles_ - 1].num_tokens++;
      } else {
        tiles_[num_tiles_++] = {row, 1, positions()[row], INT32_MAX, 0, INT32_MAX, 0};
      }
      include(tiles_[num_tiles_ - 1], row);
    }
  }

  void plan_tree(int32_t first, int32_t end) {
    const int32_t committed = batch().indices[first];
    const auto gathered_from = static_cast<int32_t>(committed / attention_chunk);
    for (int32_t row = first; row < end; row++) {
      if ((row - first) % planned_tokens_ == 0) {
        tiles_[num_tiles_++] = {row, 0, committed, gathered_from, 0, INT32_MAX, 0};
      }
      TokenTile& tile = tiles_[num_tiles_ - 1];
      tile.num_tokens++;
      include(tile, row);
    }
  }

  void include(TokenTile& tile, int64_t row) const {
    tile.num_chunks = std::max(tile.num_chunks, last_chunk(row) + 1);
    tile.first_chunk = std::min(tile.first_chunk, first_chunk(row));
    tile.last_start = std::max(tile.last_start, first_seen(row));
  }

  void append_rows(int rows, Worker& w) {
    const int64_t num_units = a_.num_heads + a_.num_kv_heads;
    const int64_t tasks_per_row = (num_units + heads_per_task - 1) / heads_per_task;
    for (int64_t task = w.take(); task < rows * tasks_per_row; task = w.take()) {
      const int64_t row = task / tasks_per_row;
      if (!places_.is_valid(row)) {
        return w.fail("attention: a row's sequence or position lies outside the caches");
      }
      const int64_t first = task % tasks_per_row * heads_per_task;
      for (int64_t unit = first; unit < std::min(first + heads_per_task, num_units); unit++) {
        if (unit < a_.num_heads) {
          prepare_query(rows, row, unit, w);
        } else {
          append_key_value(row, unit - a_.num_heads, w);
        }
      }
    }
  }

  const float* bias(const float* biases, int64_t head) const {
    return biases == nullptr ? nullptr : biases + head * a_.head_size;
  }

  // bias: of the head, or null. weight: null without a norm.
  void norm(const float* head, const float* bias, const float* weight, float* out) const {
    if (bias != nullptr) {
      kernels_.add(head, bias, out, a_.head_size);
      head = out;
    }
    if (weight == nullptr) {
      if (head == out) return;
      std::copy_n(head, a_.head_size, out);
    } else {
      kernels_.rms_norm(head, weight, a_.eps, out, a_.head_size);
    }
  }

  void prepare_query(int rows, int64_t row, int64_t head, Worker& w) {
    auto* values = reinterpret_cast<float*>(w.memory->data());
    const float* raw = a_.query_gate.row(row) + head * a_.query_floats();
    norm(raw, bias(a_.q_bias, head), a_.q_norm, values);
    kernels_.rope(values, a_.angles.row(row), a_.num_rope_pairs, a_.scale, a_.head_size);
    int32_t* out = query(w, rows, head / group_, row) + head % group_ * query_ints_;
    cache_.prepare_query(values, out, a_.head_size);
  }

  void append_key_value(int64_t row, int64_t kv_head, Worker& w) {
    auto* values = reinterpret_cast<float*>(w.memory->data());
    const int64_t offset = cache_offset(row, places_.index(row), kv_head);
    if (offset < 0 || offset >= places_.size() * a_.num_kv_heads * cache_row_) {
      return w.fail("attention: a table names a block that there is not");
    }
    norm(a_.key.row(row) + kv_head * a_.head_size, bias(a_.k_bias, kv_head), a_.k_norm, values);
    kernels_.rope(values, a_.angles.row(row), a_.num_rope_pairs, 1.0f, a_.head_size);
    cache_.store(values, cache_at(a_.k_cache, offset), a_.head_size);
    norm(a_.value.row(row) + kv_head * a_.head_size, bias(a_.v_bias, kv_head),
         a_.v_norm.empty() ? nullptr : a_.v_norm.data(), values);
    cache_.store(values, cache_at(a_.v_cache, offset), a_.head_size);
  }

  // out: of the first head of the task, those of each next one out_stride floats behind it.
  void attend(const ChunkTask& task, float* out, int64_t out_stride, float* memory, Worker& w) {
    const TokenTile& tile = *task.tile;
    const bool is_tree = tile.gathered_from != INT32_MAX;
    // At the beginning of windows, rows of a tree at different depths see different positions.
    if (task.chunk >= tile.gathered_from || (is_tree && task.chunk * attention_chunk < tile.last_start)) {
      for (int64_t token = 0; token < tile.num_tokens; token++) {
        const int64_t row = tile.first_row + token;
        if (!sees(row, task.chunk)) continue;
        for (int64_t i = 0; i < task.num_heads; i++) {
          float* to = out + i * out_stride + token * group_ * row_floats_;
          attend_gathered(task, row, task.first_head + i, to, memory, w);
        }
      }
      return;
    }
    AttentionChunk work = chunk_of(task, tile.first_row, task.first_head, out, memory, w);
    work.num_tokens = tile.num_tokens;
    work.first_position = tile.first_position;
    work.num_kv_heads = task.num_heads;
    work.rows_stride = out_stride;
    // Rows of a tree see all of the chunk; `first_position` does not hold for them.
    if (is_tree) work.window = 0;
    uint64_t words[most_tile_tokens * chunk_words];
    if (has_choice()) {
      for (int64_t token = 0; token < tile.num_tokens; token++) {
        choose(tile.first_row + token, task.chunk, words + token * chunk_words);
      }
      work.chosen = words;
    }
    const int64_t offset = cache_offset(tile.first_row, work.begin, task.first_head);
    work.keys = cache_at(a_.k_cache, offset);
    work.values = cache_at(a_.v_cache, offset);
    work.position_stride = a_.num_kv_heads * cache_row_;
    cache_.attend(work);
  }

  void attend_gathered(const ChunkTask& task, int64_t row, int64_t kv_head, float* out, float* memory,
                       Worker& w) {
    std::byte* keys = w.memory->data() + sizeof(float) * attending_floats();
    std::byte* values = keys + gathered_bytes();
    gather(row, kv_head, task.chunk, keys, values);
    AttentionChunk work = chunk_of(task, row, kv_head, out, memory, w);
    work.num_tokens = work.num_kv_heads = 1;
    work.first_position = positions()[row];
    work.keys = keys;
    work.values = values;
    work.position_stride = cache_row_;
    uint64_t words[chunk_words];
    if (has_choice()) {
      choose(row, task.chunk, words);
      work.chosen = words;
    }
    cache_.attend(work);
  }

  // Keys and values that `row` of a tree sees in a chunk, in order of position.
  void gather(int64_t row, int64_t kv_head, int64_t chunk, std::byte* keys, std::byte* values) const {
    const int64_t begin = chunk * attention_chunk, bytes = cache_row_ * element_bytes();
    const auto take = [&](int64_t position, int64_t from) {
      const int64_t offset = cache_offset(row, from, kv_head);
      std::memcpy(keys + (position - begin) * bytes, cache_at(a_.k_cache, offset), bytes);
      std::memcpy(values + (position - begin) * bytes, cache_at(a_.v_cache, offset), bytes);
    };
    int64_t committed = 0;
    for (int64_t ancestor = row; ancestor >= 0; ancestor = batch().parents[ancestor]) {
      committed = positions()[ancestor];
      if (committed >= begin && committed < begin + attention_chunk) take(committed, places_.index(ancestor));
    }
    for (int64_t position = begin; position < std::min(committed, begin + attention_chunk); position++) {
      take(position, position);
    }
  }

  AttentionChunk chunk_of(const ChunkTask& task, int64_t row, int64_t kv_head, float* out, float* memory,
                          const Worker& w) const {
    AttentionChunk work = {};
    work.q = query(w, task.rows, kv_head, row);
    work.q_stride = task.rows * group_ * query_ints_;
    work.group = group_;
    work.head_size = a_.head_size;
    work.row_elements = cache_row_;
    work.begin = task.chunk * attention_chunk;
    work.window = a_.window;
    work.rows = out;
    work.memory = memory;
    return work;
  }

  int32_t last_chunk(int64_t row) const { return positions()[row] / static_cast<int32_t>(attention_chunk); }
  // The first position that a row sees, and its chunk.
  int32_t first_seen(int64_t row) const {
    const int64_t first = a_.window == 0 ? 0 : positions()[row] - a_.window + 1;
    return static_cast<int32_t>(std::max<int64_t>(first, 0));
  }
  bool has_choice() const { return a_.chosen.words != nullptr; }

  // Bits of the positions that a row sees of a chunk.
  void choose(int64_t row, int64_t chunk, uint64_t* words) const {
    const int64_t begin = chunk * attention_chunk, size = a_.chosen.block_size;
    const int64_t end = std::min<int64_t>(positions()[row] + 1, begin + attention_chunk);
    std::fill_n(words, chunk_words, 0);
    for (int64_t at = std::max<int64_t>(first_seen(row), begin), next; at < end; at = next) {
      next = std::min(end, (at / size + 1) * size);
      if (!a_.chosen.has(row, at / size)) continue;
      for (int64_t i = at - begin; i < next - begin; i++) {
        words[i / attention_block] |= uint64_t{1} << i % attention_block;
      }
    }
  }

  // Whether the row sees a position of the chunk.
  bool sees(int64_t row, int64_t chunk) const {
    if (chunk < first_chunk(row) || chunk > last_chunk(row)) return false;
    if (!has_choice()) return true;
    if (a_.window == 0 && chunk < last_chunk(row)) return a_.chosen.has_any(row, chunk);
    uint64_t words[chunk_words];
    choose(row, chunk, words);
    return (words[0] | words[1] | words[2] | words[3]) != 0;
  }

  int32_t first_chunk(int64_t row) const { return first_seen(row) / static_cast<int32_t>(attention_chunk); }

  float* output(int64_t row, int64_t head) const { return a_.out.row(row) + head * a_.head_size; }

  void finish(float* total, SoftmaxState* state, int64_t row, int64_t head) {
    if (a_.sinks != nullptr) kernels_.attend_sink(total, state, a_.sinks[head], a_.head_size);
    cache_.finish(total, state->sum, gate(row, head), output(row, head), a_.head_size);
  }

  // Key/value heads of a task, of which there are `count` for each head: all, which lie in order of memory,
  // unless the workers would have too few tasks.
  int64_t heads_together(int64_t count, const Worker& w) const {
    if (w.count == 1 || count == 0) return a_.num_kv_heads;
    const int64_t parts = std::min((tasks_per_worker * w.count + count - 1) / count, a_.num_kv_heads);
    return (a_.num_kv_heads + parts - 1) / parts;
  }

  void attend_chunks(int rows, Worker& w) {
    auto* memory = reinterpret_cast<float*>(w.memory->data());
    int64_t num_chunks = 0;
    for (int64_t i = 0; i < num_tiles_; i++) num_chunks += tiles_[i].num_chunks - tiles_[i].first_chunk;
    const int64_t together = heads_together(num_chunks, w), head_stride = rows * group_ * row_floats_;
    const int64_t total = (a_.num_kv_heads + together - 1) / together * num_chunks;
    for (int64_t number = w.take_near(total); number < total; number = w.take_near(total)) {
      const TokenTile* tile = tiles_.data();
      int64_t chunk = number % num_chunks;
      for (; chunk >= tile->num_chunks - tile->first_chunk; tile++)
        chunk -= tile->num_chunks - tile->first_chunk;
      chunk += tile->first_chunk;
      const int64_t first_head = number / num_chunks * together;
      const ChunkTask task = {tile, chunk, first_head, std::min(together, a_.num_kv_heads - first_head),
                              rows};
      attend(task, partial(w, rows, chunk, first_head, tile->first_row), head_stride, memory, w);
    }
  }

  void merge_chunks(int rows, Worker& w) {
    for (int64_t task = w.take(); task < rows * a_.num_heads; task = w.take()) {
      const int64_t row = task / a_.num_heads, head = task % a_.num_heads;
      const int64_t kv_head = head / group_, offset = head % group_ * row_floats_;
      int64_t chunk = first_chunk(row);
      while (!sees(row, chunk) && chunk < last_chunk(row)) chunk++;
      float* total = partial(w, rows, chunk, kv_head, row) + offset;
      SoftmaxState* state = softmax_state(total, a_.head_size);
      for (chunk++; chunk <= last_chunk(row); chunk++) {
        if (!sees(row, chunk)) continue;
        kernels_.attend_merge(total, state, partial(w, rows, chunk, kv_head, row) + offset, a_.head_size);
      }
      finish(total, state, row, head);
    }
  }

  void attend_tiles(int rows, Worker& w) {
    const int64_t together = heads_together(num_tiles_, w);
    const int64_t num_parts = (a_.num_kv_heads + together - 1) / together, total = num_tiles_ * num_parts;
    for (int64_t number = w.take(); number < total; number = w.take()) {
      // Later tokens see more positions: the longest tasks first.
      const TokenTile& tile = tiles_[num_tiles_ - 1 - number / num_parts];
      const int64_t first_head = number % num_parts * together;
      attend_tile({&tile, 0, first_head, std::min(together, a_.num_kv_heads - first_head), rows}, w);
    }
  }

  // All chunks of a tile. Totals are where the output is to be.
  void attend_tile(ChunkTask task, Worker& w) {
    const TokenTile& tile = *task.tile;
    const int64_t tile_rows = tile_tokens_ * group_, num_rows = tile.num_tokens * group_;
    auto* states = reinterpret_cast<SoftmaxState*>(w.memory->data());
    auto* results = reinterpret_cast<float*>(states + task.num_heads * tile_rows);
    float* memory = results + task.num_heads * tile_rows * row_floats_;
    uint64_t begun = 0;  // bits of the tokens that have a total
    for (task.chunk = tile.first_chunk; task.chunk < tile.num_chunks; task.chunk++) {
      attend(task, results, tile_rows * row_floats_, memory, w);
      for (int64_t token = 0; token < tile.num_tokens; token++) {
        if (!sees(tile.first_row + token, task.chunk)) continue;
        const bool is_first = !(begun >> token & 1);
        begun |= uint64_t{1} << token;
        for (int64_t i = 0; i < task.num_heads * group_; i++) {
          const int64_t at = i / group_ * tile_rows + token * group_ + i % group_;
          float* total = output(tile.first_row + token, task.first_head * group_ + i);
          add_result(total, states + at, results + at * row_floats_, is_first);
        }
      }
    }
    for (int64_t i = 0; i < task.num_heads; i++) {
      for (int64_t r = 0; r < num_rows; r++) {
        const int64_t row = tile.first_row + r / group_, head = (task.first_head + i) * group_ + r % group_;
        finish(output(row, head), states + i * tile_rows + r, row, head);
      }
    }
  }

  void add_result(float* total, SoftmaxState* state, float* result, bool is_first) const {
    if (is_first) {
      std::copy_n(result, a_.head_size, total);
      *state = *softmax_state(result, a_.head_size);
    } else {
      kernels_.attend_merge(total, state, result, a_.head_size);
    }
  }

  const FloatKernels& kernels_;
  const CacheKernels& cache_;
  const AttentionArguments a_;
  const CachePlaces places_;
  const int64_t group_, tile_tokens_, row_floats_, query_ints_, cache_row_, max_chunks_;
  std::vector<TokenTile> tiles_;
  int64_t num_tiles_ = 0, planned_tokens_ = 0;  // tokens: of a tile, at most
};

}  // namespace

std::unique_ptr<Op> make_attention(const FloatKernels& kernels, const AttentionArguments& arguments) {
  return std::make_unique<AttentionOp>(kernels, arguments);
}

}  // namespace coldstream
