#include "quant/linear.h"

#include <algorithm>

#include "quant/blocks.h"
#include "quant/slices.h"

namespace coldstream {

namespace {

// Up to this many inputs, each worker quantises for itself: cheaper than the barrier after a stage.
constexpr int64_t private_quantize_elements = 8192;
// Weight rows of a task of GEMM, whose rows of activations make it long.
constexpr int64_t max_slice = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

LinearOp::LinearOp(const QuantKernels& kernels, FloatRowsIn x, int64_t cols, std::vector<LinearPart> parts,
                   int capacity)
    : kernels_(kernels), x_(x), cols_(cols), parts_(std::move(parts)), capacity_(capacity), total_rows_(0) {
  for (const LinearPart& part : parts_) {
    total_rows_ += part.w.num_rows;
    forms_.add(part.w.type);
  }
  scratch_bytes_ = count_scratch_bytes();
  shared_bytes_ = count_shared_bytes();
}

bool LinearOp::is_tiled(const LinearPart& part, int rows) const {
  return prefers_tiles(kernels_, part.w.type, rows);
}

bool LinearOp::has_tiled(int rows) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const LinearPart& part) { return is_tiled(part, rows); });
}

bool LinearOp::has_untiled(int rows) const {
  return std::any_of(parts_.begin(), parts_.end(), [&](const LinearPart& part) {
    return quant_is_integer(part.w.type) && !is_tiled(part, rows);
  });
}

bool LinearOp::quantizes_apart() const {
  return forms_.any() && (has_tiled(capacity_) || capacity_ * cols_ > private_quantize_elements);
}

size_t LinearOp::count_scratch_bytes() const {
  const size_t rows_kept = quantizes_apart() ? (has_tiled(capacity_) ? tile_rows : 0) : capacity_;
  return multiply_bytes(kernels_, cols_) + rows_kept * forms_.row_bytes(cols_);
}

size_t LinearOp::count_shared_bytes() const {
  if (!quantizes_apart()) return 0;
  int rows = capacity_;
  while (rows > 0 && !has_untiled(rows)) rows--;
  return tile_bytes(capacity_) + static_cast<size_t>(rows) * forms_.row_bytes(cols_);
}

size_t LinearOp::tile_bytes(int rows) const {
  if (!has_tiled(rows)) return 0;
  const int64_t num_tiles = ceil_div(rows, tile_rows) * num_groups(cols_) * forms_.count();
  return static_cast<size_t>(num_tiles) * sizeof(ActivationTile);
}

void LinearOp::run(int stage, int rows, Worker& w) {
  if (stage == 0 && quantizes_apart()) {
    quantize(rows, w);
  } else {
    multiply_slices(rows, w);
  }
}

bool LinearOp::runs_alone(int stage, int rows) const {
  if (stage == 0 && quantizes_apart()) return rows * cols_ <= small_work;
  return rows * total_rows_ * cols_ <= small_work;
}

void LinearOp::quantize(int rows, Worker& w) const {
  if (!has_tiled(rows)) {
    for (int64_t t = w.take(); t < rows; t = w.take())
      quantize_row(t, rows_of(rows, w) + t * forms_.row_bytes(cols_));
    return;
  }
  for (int64_t tile = w.take(); tile < ceil_div(rows, tile_rows); tile = w.take())
    forms_.for_each([&](ActivationForm form) { quantize_tile(tile, rows, form, w); });
}

void LinearOp::quantize_row(int64_t t, std::byte* memory) const {
  forms_.for_each(
      [&](ActivationForm form) { kernels_.quantize_row(x_.row(t), cols_, forms_.row(memory, cols_, form)); });
}

void LinearOp::quantize_tile(int64_t tile, int rows, ActivationForm form, Worker& w) const {
  ActivationRow part[tile_rows];
  const int count = static_cast<int>(std::min<int64_t>(tile_rows, rows - tile * tile_rows));
  std::byte* memory = w.memory->data();
  if (has_untiled(rows)) memory = rows_of(rows, w) + tile * tile_rows * forms_.row_bytes(cols_);
  for (int i = 0; i < count; i++) {
    part[i] = forms_.row(memory + i * forms_.row_bytes(cols_), cols_, form);
    kernels_.quantize_row(x_.row(tile * tile_rows + i), cols_, part[i]);
  }
  kernels_.pack(part, count, cols_, tiles_of(form, rows, w) + tile * num_groups(cols_));
}

// The tiles of a batch lie form by form, and its rows behind them.
ActivationTile* LinearOp::tiles_of(ActivationForm form, int rows, Worker& w) const {
  const int64_t num_tiles = ceil_div(rows, tile_rows) * num_groups(cols_);
  return reinterpret_cast<ActivationTile*>(w.shared->data()) + forms_.index(form) * num_tiles;
}

std::byte* LinearOp::rows_of(int rows, Worker& w) const { return w.shared->data() + tile_bytes(rows); }

void LinearOp::multiply_slices(int rows, Worker& w) const {
  std::byte* quantized = rows_of(rows, w);
  std::byte* memory = w.memory->data();
  if (forms_.any() && !quantizes_apart()) {
    const size_t row_bytes = forms_.row_bytes(cols_);
    for (int t = 0; t < rows; t++) quantize_row(t, memory + t * row_bytes);
    quantized = memory;
    memory += rows * row_bytes;
  }
  const int64_t total = ceil_div(rows, pass_rows) * total_rows_;
  ShrinkingSlices slices(total, w.count, has_tiled(rows) ? 32 : 8, rows > gemv_max_rows ? max_slice : total);
  for (auto next = slices.of(w.take()); !next.is_empty(); next = slices.of(w.take()))
    multiply_range(next.begin, next.end, rows, quantized, memory, w);
}

// Of the rows of all weights, for one pass over the activation rows after the other.
void LinearOp::multiply_range(int64_t begin, int64_t end, int rows, std::byte* quantized, std::byte* memory,
                              Worker& w) const {
  for (int64_t pass = begin / total_rows_; pass * total_rows_ < end; pass++) {
    const int first_row = static_cast<int>(pass * pass_rows);
    const int num_rows = std::min(static_cast<int>(pass_rows), rows - first_row);
    int64_t first = pass * total_rows_;
    for (const LinearPart& part : parts_) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + part.w.num_rows);
      if (from < to) {
        const ActivationTile* tiles = nullptr;
        if (is_tiled(part, rows))
          tiles = tiles_of(form_of(part.w.type), rows, w) + first_row / tile_rows * num_groups(cols_);
        multiply_slice(part, from - first, to - first, first_row, num_rows, tiles, quantized, memory);
      }
      first += part.w.num_rows;
    }
  }
}

void LinearOp::multiply_slice(const LinearPart& part, int64_t begin, int64_t end, int first_row, int num_rows,
                              const ActivationTile* tiles, std::byte* quantized, std::byte* memory) const {
  const bool reads_rows = tiles == nullptr && quant_is_integer(part.w.type);
  const float* x[pass_rows];
  ActivationRow q[pass_rows];
  float* out[pass_rows] = {};
  for (int t = 0; t < num_rows; t++) {
    x[t] = x_.row(first_row + t);
    if (reads_rows)
      q[t] = forms_.row(quantized + (first_row + t) * forms_.row_bytes(cols_), cols_, form_of(part.w.type));
    out[t] = part.out.row(first_row + t) + begin;
  }
  const WeightRows rows = {part.w.type, part.w.data + begin * part.w.row_bytes, part.w.row_bytes, end - begin,
                           cols_};
  multiply(kernels_, rows, {x, q, tiles, out, num_rows}, memory);
}

}  // namespace coldstream
