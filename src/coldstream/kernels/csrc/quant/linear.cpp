#include "quant/linear.h"

#include <algorithm>

#include "quant/blocks.h"

namespace coldstream {

namespace {

// Up to this many inputs, each worker quantises for itself: cheaper than the barrier after a stage.
constexpr int64_t private_quantize_elements = 8192;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

linear_op::linear_op(const quant_kernels& kernels, float_rows_in x, int64_t cols,
                     std::vector<linear_part> parts, int capacity)
    : kernels_(kernels),
      x_(x),
      cols_(cols),
      parts_(std::move(parts)),
      capacity_(capacity),
      total_rows_(0),
      any_integer_(false) {
  for (const linear_part& part : parts_) {
    total_rows_ += part.w.num_rows;
    any_integer_ |= quant_is_integer(part.w.type);
  }
}

bool linear_op::quantizes_apart() const {
  return any_integer_ &&
         (prefers_tiles(kernels_, capacity_) || capacity_ * cols_ > private_quantize_elements);
}

size_t linear_op::scratch_bytes() const {
  const size_t rows_kept =
      quantizes_apart() ? (prefers_tiles(kernels_, capacity_) ? tile_rows : 0) : capacity_;
  return multiply_bytes(kernels_, cols_) + rows_kept * activation_row::bytes(cols_);
}

size_t linear_op::shared_bytes() const {
  if (!quantizes_apart()) return 0;
  const size_t tiles =
      prefers_tiles(kernels_, capacity_)
          ? static_cast<size_t>(ceil_div(capacity_, tile_rows) * num_groups(cols_)) * sizeof(activation_tile)
          : 0;
  return std::max(tiles, static_cast<size_t>(capacity_) * activation_row::bytes(cols_));
}

void linear_op::run(int stage, int rows, worker& w) {
  if (stage == 0 && quantizes_apart()) {
    quantize(rows, w);
  } else {
    multiply_slices(rows, w);
  }
}

void linear_op::quantize(int rows, worker& w) const {
  const size_t row_bytes = activation_row::bytes(cols_);
  if (!prefers_tiles(kernels_, rows)) {
    for (int64_t t = w.take(); t < rows; t = w.take()) {
      kernels_.quantize_row(x_.row(t), cols_, activation_row::at(w.shared->data() + t * row_bytes, cols_));
    }
    return;
  }
  auto* tiles = reinterpret_cast<activation_tile*>(w.shared->data());
  for (int64_t tile = w.take(); tile < ceil_div(rows, tile_rows); tile = w.take()) {
    activation_row part[tile_rows];
    const int count = static_cast<int>(std::min<int64_t>(tile_rows, rows - tile * tile_rows));
    for (int i = 0; i < count; i++) {
      part[i] = activation_row::at(w.memory->data() + i * row_bytes, cols_);
      kernels_.quantize_row(x_.row(tile * tile_rows + i), cols_, part[i]);
    }
    kernels_.pack(part, count, cols_, tiles + tile * num_groups(cols_));
  }
}

void linear_op::multiply_slices(int rows, worker& w) const {
  const bool tiled = any_integer_ && prefers_tiles(kernels_, rows);
  const std::byte* quantized = w.shared->data();
  std::byte* memory = w.memory->data();
  if (any_integer_ && !quantizes_apart()) {
    for (int t = 0; t < rows; t++) {
      const auto row = activation_row::at(memory + t * activation_row::bytes(cols_), cols_);
      kernels_.quantize_row(x_.row(t), cols_, row);
    }
    quantized = memory;
    memory += rows * activation_row::bytes(cols_);
  }
  // Small enough slices that all workers end together, large enough that a slice amortises its start.
  const int64_t even_share = total_rows_ / (int64_t{16} * w.count), step = tiled ? 32 : 8;
  const int64_t slice = std::clamp<int64_t>(even_share / step * step, step, 128);
  const int num_passes = static_cast<int>(ceil_div(rows, pass_rows));
  int64_t task = w.take(), first_task = 0;
  for (int pass = 0; pass < num_passes; pass++) {
    const int first_row = static_cast<int>(pass * pass_rows);
    const int num_rows = std::min(static_cast<int>(pass_rows), rows - first_row);
    for (const linear_part& part : parts_) {
      const int64_t num_tasks = ceil_div(part.w.num_rows, slice);
      for (; task < first_task + num_tasks; task = w.take()) {
        const int64_t begin = (task - first_task) * slice;
        multiply_slice(part, begin, std::min(begin + slice, part.w.num_rows), first_row, num_rows, tiled,
                       quantized, memory);
      }
      first_task += num_tasks;
    }
  }
}

void linear_op::multiply_slice(const linear_part& part, int64_t begin, int64_t end, int first_row,
                               int num_rows, bool tiled, const std::byte* quantized,
                               std::byte* memory) const {
  const float* x[pass_rows];
  activation_row q[pass_rows];
  float* out[pass_rows] = {};
  for (int t = 0; t < num_rows; t++) {
    x[t] = x_.row(first_row + t);
    if (any_integer_ && !tiled) {
      auto* bytes = const_cast<std::byte*>(quantized) + (first_row + t) * activation_row::bytes(cols_);
      q[t] = activation_row::at(bytes, cols_);
    }
    out[t] = part.out.row(first_row + t) + begin;
  }
  const auto* tiles =
      reinterpret_cast<const activation_tile*>(quantized) + first_row / tile_rows * num_groups(cols_);
  const weight_rows rows = {part.w.type, part.w.data + begin * part.w.row_bytes, part.w.row_bytes,
                            end - begin, cols_};
  multiply(kernels_, rows, {x, q, tiled ? tiles : nullptr, out, num_rows}, memory);
}

}  // namespace coldstream
