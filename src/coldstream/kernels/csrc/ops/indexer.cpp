// The indexer of attention. Rows first append their raw keys to its cache. The row at the last position of a
// block then writes the key of the block in place of its own: no other row reads that one. So a block's key
// lies where its last row does, also in a draft tree, and moves with it when it is committed.
//
// Up to split_rows rows: the scores of every unit of positions are a task, and a last stage chooses. Beyond:
// a task does both for a few rows.
#include "ops/indexer.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace coldstream {

namespace {

constexpr int64_t split_rows = 8;  // most rows whose units are separate tasks; also most rows of a tile
constexpr int64_t unit = attention_chunk;

// Consecutive rows of one sequence whose scores are computed together.
struct RowTile {
  int32_t first, count;
};

class ChooseBlocksOp : public Op {
 public:
  ChooseBlocksOp(const FloatKernels& kernels, const IndexerArguments& arguments)
      : kernels_(kernels),
        index_(kernels.index[static_cast<int>(arguments.type)]),
        a_(arguments),
        element_bytes_(arguments.type == CacheType::f16 ? sizeof(Float16) : sizeof(float)),
        blocks_per_unit_(unit / arguments.block_size),
        num_units_((arguments.places.max_positions() + unit - 1) / unit),
        row_scores_(num_units_ * blocks_per_unit_),
        tiles_(arguments.capacity) {}

  const char* name() const override { return "choose_blocks"; }
  int num_stages() const override { return 4; }

  size_t scratch_bytes() const override {
    return ranks_bytes() + sizeof(float) * (split_rows * row_scores_ + memory_floats()) + gathered_bytes();
  }
  size_t shared_bytes() const override {
    const int64_t most_rows = std::min(a_.capacity, split_rows);
    return sizeof(float) * (a_.capacity * query_floats() + most_rows * row_scores_);
  }

  bool runs_alone(int stage, int rows) const override {
    if (stage == 2) return rows > split_rows;  // without work
    return stage < 2 && rows * (query_floats() + a_.head_size) <= small_work / 4;
  }

  void run(int stage, int rows, Worker& w) override {
    switch (stage) {
      case 0:
        if (w.index == 0) plan_tiles(rows, w);
        return append_rows(rows, w);
      case 1:
        return complete_blocks(rows, w);
      case 2:
        if (rows <= split_rows) score_units(rows, w);
        return;
      default:
        return rows <= split_rows ? choose_rows(rows, w) : choose_tiles(w);
    }
  }

 private:
  int64_t query_floats() const { return a_.num_heads * a_.head_size; }
  int64_t memory_floats() const { return block_score_floats(split_rows, a_.num_heads, a_.head_size); }
  int64_t gathered_bytes() const { return attention_block * a_.head_size * element_bytes_; }
  size_t ranks_bytes() const { return sizeof(uint64_t) * row_scores_; }

  // Shared memory: prepared queries, then scores of split_rows rows.
  float* query(int64_t row, Worker& w) const {
    return reinterpret_cast<float*>(w.shared->data()) + row * query_floats();
  }
  float* shared_scores(int64_t row, Worker& w) const { return query(a_.capacity, w) + row * row_scores_; }
  // Private memory: ranks of a row's blocks, scores of a tile, memory of a kernel, gathered keys.
  uint64_t* ranks(Worker& w) const { return reinterpret_cast<uint64_t*>(w.memory->data()); }
  float* tile_scores(Worker& w) const { return reinterpret_cast<float*>(w.memory->data() + ranks_bytes()); }
  float* memory(Worker& w) const { return tile_scores(w) + split_rows * row_scores_; }
  std::byte* gathered(Worker& w) const { return reinterpret_cast<std::byte*>(memory(w) + memory_floats()); }

  std::byte* cache_row(int64_t row, int64_t index) const {
    return static_cast<std::byte*>(a_.cache) + a_.places.place(row, index) * a_.head_size * element_bytes_;
  }
  int64_t position(int64_t row) const { return a_.places.position(row); }
  // Blocks that are complete at the row.
  int64_t num_complete(int64_t row) const { return (position(row) + 1) / a_.block_size; }
  bool has_choice(int64_t row) const { return num_complete(row) > a_.num_blocks; }

  void plan_tiles(int32_t rows, Worker& w) {
    num_tiles_ = 0;
    const RowLayout& layout = a_.places.layout;
    for (int32_t first = 0, end; first < rows; first = end) {
      end = group_end(layout, first, rows);
      if (layout.in_batch()) {
        if (const char* fault = a_.places.segment_fault(first, end)) return w.fail(fault);
      }
      for (int32_t row = first; row < end; row += split_rows) {
        tiles_[num_tiles_++] = {row, static_cast<int32_t>(std::min<int64_t>(split_rows, end - row))};
      }
    }
  }

  void append_rows(int rows, Worker& w) {
    const int64_t size = a_.head_size;
    auto* values = reinterpret_cast<float*>(w.memory->data());
    for (int64_t row = w.take(); row < rows; row = w.take()) {
      if (!a_.places.is_valid(row)) {
        return w.fail("choose_blocks: a row's sequence or position lies outside the cache");
      }
      const int64_t place = a_.places.place(row, a_.places.index(row));
      if (place < 0 || place >= a_.places.size()) {
        return w.fail("choose_blocks: a table names a block that there is not");
      }
      for (int64_t head = 0; head < a_.num_heads; head++) {
        float* out = query(row, w) + head * size;
        kernels_.rms_norm(a_.query.row(row) + head * size, a_.q_norm, a_.eps, out, size);
        kernels_.rope(out, a_.angles.row(row), a_.num_rope_pairs, 1.0f, size);
      }
      std::copy_n(a_.key.row(row), size, values);
      index_.store(values, cache_row(row, a_.places.index(row)), size);
    }
  }

  void complete_blocks(int rows, Worker& w) {
    const int64_t size = a_.head_size;
    auto* values = reinterpret_cast<float*>(w.memory->data());
    for (int64_t row = w.take(); row < rows; row = w.take()) {
      const int64_t end = position(row) + 1;
      if (end % a_.block_size != 0) continue;
      const void* keys[max_chosen_block];
      for (int64_t i = 0; i < a_.block_size; i++) {
        keys[i] = cache_row(row, a_.places.index_at(row, end - a_.block_size + i));
      }
      index_.average(keys, a_.block_size, values, size);
      kernels_.rms_norm(values, a_.k_norm, a_.eps, values, size);
      kernels_.rope(values, a_.block_angles.row(row), a_.num_rope_pairs, 1.0f, size);
      index_.store(values, cache_row(row, a_.places.index(row)), size);
    }
  }

  // Scores of the blocks in one unit of positions: out[token, block].
  void score(RowTile tile, int64_t number, float* out, Worker& w) const {
    const int64_t most = (last_position(tile) + 1) / a_.block_size;
    const int64_t count = std::min(blocks_per_unit_, most - number * blocks_per_unit_);
    if (count <= 0) return;
    const bool is_tree = a_.places.layout.in_tree(tile.first);
    // Rows of a tree see the same of a unit if all of it is committed.
    if (!is_tree || (number + 1) * unit <= first_uncommitted(tile.first)) {
      const int64_t first = number * unit + a_.block_size - 1;
      return score_keys(tile, cache_row(tile.first, first), a_.block_size * a_.head_size, count, out, w);
    }
    const int64_t row_bytes = a_.head_size * element_bytes_;
    for (int32_t i = 0; i < tile.count; i++) {
      const int32_t row = tile.first + i;
      const int64_t seen = std::min(count, num_complete(row) - number * blocks_per_unit_);
      for (int64_t block = 0; block < seen; block++) {
        const int64_t at = number * unit + (block + 1) * a_.block_size - 1;
        std::memcpy(gathered(w) + block * row_bytes, cache_row(row, a_.places.index_at(row, at)), row_bytes);
      }
      if (seen > 0) score_keys({row, 1}, gathered(w), a_.head_size, seen, out + i * row_scores_, w);
    }
  }

  // Of the tree that `row` is in: its first row with no parent is at the first position behind.
  int64_t first_uncommitted(int64_t row) const {
    const int32_t* parents = a_.places.layout.batch.parents;
    while (parents[row] >= 0) row = parents[row];
    return position(row);
  }

  void score_keys(RowTile tile, const std::byte* keys, int64_t stride, int64_t count, float* out,
                  Worker& w) const {
    BlockScores scores = {};
    scores.queries = query(tile.first, w);
    scores.num_tokens = tile.count;
    scores.num_heads = a_.num_heads;
    scores.size = a_.head_size;
    scores.keys = keys;
    scores.stride = stride;
    scores.count = count;
    scores.out = out;
    scores.out_stride = row_scores_;
    scores.memory = memory(w);
    index_.score(scores);
  }

  bool has_choice(RowTile tile) const {
    for (int64_t row = tile.first; row < tile.first + tile.count; row++) {
      if (has_choice(row)) return true;
    }
    return false;
  }

  int64_t last_position(RowTile tile) const {
    int64_t last = 0;
    for (int64_t row = tile.first; row < tile.first + tile.count; row++) last = std::max(last, position(row));
    return last;
  }

  void score_units(int rows, Worker& w) {
    const int64_t num_units = last_position({0, rows}) / unit + 1;
    for (int64_t task = w.take(); task < num_tiles_ * num_units; task = w.take()) {
      const RowTile tile = tiles_[task % num_tiles_];
      const int64_t number = task / num_tiles_;
      if (!has_choice(tile)) continue;
      score(tile, number, shared_scores(tile.first, w) + number * blocks_per_unit_, w);
    }
  }

  void choose_rows(int rows, Worker& w) {
    for (int64_t row = w.take(); row < rows; row = w.take()) choose(row, shared_scores(row, w), w);
  }

  void choose_tiles(Worker& w) {
    for (int64_t task = w.take(); task < num_tiles_; task = w.take()) {
      // Later rows see more blocks: the longest tasks first.
      const RowTile tile = tiles_[num_tiles_ - 1 - task];
      float* scores = tile_scores(w);
      const int64_t last = last_position(tile);
      for (int64_t number = 0; has_choice(tile) && number <= last / unit; number++) {
        score(tile, number, scores + number * blocks_per_unit_, w);
      }
      for (int32_t i = 0; i < tile.count; i++) choose(tile.first + i, scores + i * row_scores_, w);
    }
  }

  // The best complete blocks, of equal ones the first, and the positions behind them.
  void choose(int64_t row, const float* scores, Worker& w) const {
    int32_t* words = a_.words + row * a_.num_words;
    const int64_t complete = num_complete(row);
    std::fill_n(words, a_.num_words, 0);
    const auto add = [&](int64_t block) {
      words[block / 32] = static_cast<int32_t>(static_cast<uint32_t>(words[block / 32]) | 1u << block % 32);
    };
    if ((position(row) + 1) % a_.block_size != 0) add(complete);
    if (!has_choice(row)) {
      for (int64_t block = 0; block < complete; block++) add(block);
      return;
    }
    // Scores are not negative, so that their bits are in the same order.
    uint64_t* rank = ranks(w);
    for (int64_t block = 0; block < complete; block++) {
      uint32_t bits;
      std::memcpy(&bits, scores + block, sizeof(bits));
      rank[block] = uint64_t{bits} << 32 | (UINT32_MAX - static_cast<uint32_t>(block));
    }
    std::nth_element(rank, rank + a_.num_blocks, rank + complete, std::greater<>());
    for (int64_t i = 0; i < a_.num_blocks; i++) add(UINT32_MAX - static_cast<uint32_t>(rank[i]));
  }

  const FloatKernels& kernels_;
  const IndexKernels& index_;
  const IndexerArguments a_;
  const int64_t element_bytes_, blocks_per_unit_, num_units_, row_scores_;
  std::vector<RowTile> tiles_;
  int64_t num_tiles_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_choose_blocks(const FloatKernels& kernels, const IndexerArguments& arguments) {
  return std::make_unique<ChooseBlocksOp>(kernels, arguments);
}

}  // namespace coldstream
