#include "quant/experts.h"

#include <algorithm>
#include <cstring>

#include "quant/blocks.h"
#include "quant/slices.h"

namespace coldstream {

namespace {

// Weight rows of a task of long jobs, if these are not alike. The first rows of a task come late from memory.
constexpr int64_t least_most = 64;
// Of the work of a worker, the most that a task may be is one of so many parts.
constexpr int64_t parts_of_share = 8;
// Reading a weight takes as long as multiplying it with so many rows.
constexpr int64_t rows_of_reading = 8;
// Values of gate, and as many of up, that a task keeps in private memory.
constexpr int64_t kept_values = pass_rows * 64;

}  // namespace

RoutedExpertsOp::RoutedExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args, int capacity)
    : kernels_(kernels), args_(std::move(args)), tiled_(may_be_tiled(capacity)) {
  x_forms_.add(args_.gate.type);
  x_forms_.add(args_.up.type);
  h_forms_.add(args_.down.type);
  layout_ = make_layout(capacity);
}

bool RoutedExpertsOp::may_be_tiled(int rows) const {
  return prefers_tiles(kernels_, args_.gate.type, rows) || prefers_tiles(kernels_, args_.up.type, rows) ||
         prefers_tiles(kernels_, args_.down.type, rows);
}

RoutedExpertsOp::Layout RoutedExpertsOp::make_layout(int capacity) const {
  const int64_t num_experts = args_.gate.num_matrices, x_cols = args_.gate.num_cols,
                h_cols = args_.down.num_cols, num_pairs = int64_t{capacity} * args_.num_experts_per_tok;
  // The last tile of every used expert may be partial.
  const int64_t max_tiles = num_pairs / tile_rows + std::min(num_experts, num_pairs);
  const int64_t tile_groups = tiled_ ? max_tiles : 0;
  Layout l{};
  const auto place = [&](int64_t count, size_t bytes) {
    const size_t offset = l.total;
    l.total += (static_cast<size_t>(count) * bytes + 63) / 64 * 64;
    return offset;
  };
  l.groups = place(1, sizeof(Groups));
  l.jobs = place(max_tiles, sizeof(Job));
  l.tiles = place(max_tiles, sizeof(Tile));
  l.pairs = place(num_pairs, sizeof(int32_t));
  l.ends = place(num_experts, sizeof(int32_t));
  l.hidden = place(num_pairs * args_.gate.num_rows, sizeof(float));
  l.x_rows = place(capacity, x_forms_.row_bytes(x_cols));
  l.h_rows = place(num_pairs, h_forms_.row_bytes(h_cols));
  l.x_form_bytes = static_cast<size_t>(tile_groups * num_groups(x_cols)) * sizeof(ActivationTile);
  l.x_tiles = place(x_forms_.count(), l.x_form_bytes);
  l.h_tiles = place(h_forms_.count() * tile_groups * num_groups(h_cols), sizeof(ActivationTile));
  return l;
}

size_t RoutedExpertsOp::scratch_bytes() const {
  const size_t products = multiply_bytes(kernels_, std::max(args_.gate.num_cols, args_.down.num_cols));
  return products + 2 * static_cast<size_t>(kept_values) * sizeof(float);
}

void RoutedExpertsOp::run(int stage, int rows, Worker& w) {
  if (!tiled_ && stage > 0) stage++;
  switch (stage) {
    case 0:
      return prepare(rows, w);
    case 1:
      return pack_x(w);
    case 2:
      return gate_up(rows, w);
    case 3:
      return quantize_hidden(w);
    default:
      return down(rows, w);
  }
}

bool RoutedExpertsOp::runs_alone(int stage, int rows) const {
  if (!tiled_ && stage > 0) stage++;
  switch (stage) {
    case 0:
      return rows * args_.gate.num_cols <= small_work;
    case 1:
      return !may_be_tiled(rows);  // no expert has more rows, so that there is nothing to pack
    case 3:
      return rows * args_.num_experts_per_tok * args_.down.num_cols <= small_work;
    default:
      return false;
  }
}

ActivationRow RoutedExpertsOp::x_row(const Worker& w, int64_t token, ActivationForm form) const {
  const int64_t cols = args_.gate.num_cols;
  return x_forms_.row(at<std::byte>(w, layout_.x_rows) + token * x_forms_.row_bytes(cols), cols, form);
}

ActivationRow RoutedExpertsOp::h_row(const Worker& w, int64_t pair) const {
  const int64_t cols = args_.down.num_cols;
  auto* memory = at<std::byte>(w, layout_.h_rows) + pair * h_forms_.row_bytes(cols);
  return h_forms_.row(memory, cols, form_of(args_.down.type));
}

// Activation tiles of a job for gate or up; null if the product reads rows.
const ActivationTile* RoutedExpertsOp::x_tiles(const Worker& w, const Job& j, QuantType weight) const {
  if (!is_tiled(j, weight)) return nullptr;
  const size_t form_at = static_cast<size_t>(x_forms_.index(form_of(weight))) * layout_.x_form_bytes;
  return at<ActivationTile>(w, layout_.x_tiles + form_at) + j.first_tile * num_groups(args_.gate.num_cols);
}

const float* RoutedExpertsOp::hidden_row(const Worker& w, int64_t pair) const {
  return at<float>(w, layout_.hidden) + pair * args_.gate.num_rows;
}

int64_t RoutedExpertsOp::token_of(const Worker& w, int64_t pair) const {
  return at<int32_t>(w, layout_.pairs)[pair] / args_.num_experts_per_tok;
}

void RoutedExpertsOp::prepare(int rows, Worker& w) const {
  const int num_rows = x_forms_.any() && quantized_rows_ != XRows::none ? rows : 0;
  for (int64_t task = w.take(); task < 1 + num_rows; task = w.take()) {
    if (task == 0) {
      group_pairs(rows, w);
    } else if (quantized_rows_ == XRows::all || has_pair(task - 1)) {
      x_forms_.for_each([&](ActivationForm form) {
        kernels_.quantize_row(args_.x.row(task - 1), args_.gate.num_cols, x_row(w, task - 1, form));
      });
    }
  }
}

// Whether any pair of the row is computed here.
bool RoutedExpertsOp::has_pair(int64_t row) const {
  const int32_t* ids = args_.topk_ids + row * args_.topk_stride;
  return std::any_of(ids, ids + args_.num_experts_per_tok, [](int32_t id) { return id != not_here; });
}

// A counting sort of the pairs by expert; then the jobs and tiles of each expert.
void RoutedExpertsOp::group_pairs(int rows, Worker& w) const {
  const int ranks = args_.num_experts_per_tok;
  const int64_t num_experts = args_.gate.num_matrices;
  auto* ends = at<int32_t>(w, layout_.ends);
  auto* pairs = at<int32_t>(w, layout_.pairs);
  std::memset(ends, 0, static_cast<size_t>(num_experts) * sizeof(int32_t));
  auto& found = *at<Groups>(w, layout_.groups);
  found = {};
  for (int t = 0; t < rows; t++) {
    for (int k = 0; k < ranks; k++) {
      const int64_t id = args_.topk_ids[t * args_.topk_stride + k];
      if (id == not_here) continue;
      if (id < 0 || id >= num_experts) return w.fail("an expert id lies outside the experts of the layer");
      ends[id]++;
    }
  }
  for (int32_t e = 0, first = 0; e < num_experts; e++) {
    const int32_t count = ends[e];
    for (int32_t i = 0; i < count; i += pass_rows) {
      const auto in_job = std::min(static_cast<int32_t>(pass_rows), count - i);
      found.longest = std::max(found.longest, in_job);
      at<Job>(w, layout_.jobs)[found.num_jobs] = {e, first + i, in_job, found.num_tiles};
      for (int32_t r = 0; r < in_job; r += tile_rows) {
        const auto in_tile = std::min(tile_rows, in_job - r);
        at<Tile>(w, layout_.tiles)[found.num_tiles++] = {found.num_jobs, first + i + r, in_tile};
      }
      found.num_jobs++;
    }
    ends[e] = first;
    first += count;
    found.num_pairs = first;
  }
  for (int t = 0; t < rows; t++) {
    for (int k = 0; k < ranks; k++) {
      const int32_t id = args_.topk_ids[t * args_.topk_stride + k];
      if (id != not_here) pairs[ends[id]++] = t * ranks + k;
    }
  }
}

void RoutedExpertsOp::pack_x(Worker& w) const {
  if (!x_forms_.any()) return;
  for (int64_t i = w.take(); i < at<Groups>(w, layout_.groups)->num_tiles; i = w.take())
    x_forms_.for_each([&](ActivationForm form) { pack_x_tile(i, form, w); });
}

void RoutedExpertsOp::pack_x_tile(int64_t i, ActivationForm form, Worker& w) const {
  const int64_t cols = args_.gate.num_cols;
  const Tile& next = at<Tile>(w, layout_.tiles)[i];
  const Job& job = at<Job>(w, layout_.jobs)[next.job];
  const auto reads = [&](QuantType weight) { return is_tiled(job, weight) && form_of(weight) == form; };
  if (!reads(args_.gate.type) && !reads(args_.up.type)) return;
  ActivationRow rows[tile_rows];
  for (int r = 0; r < next.count; r++) rows[r] = x_row(w, token_of(w, next.first_pair + r), form);
  const size_t form_at = static_cast<size_t>(x_forms_.index(form)) * layout_.x_form_bytes;
  kernels_.pack(rows, next.count, cols,
                at<ActivationTile>(w, layout_.x_tiles + form_at) + i * num_groups(cols));
}

// The most weight rows of a task, of `total` rows of all jobs. Long jobs are not equally long: no task of the
// longest may be a large share of all.
int64_t RoutedExpertsOp::most_rows(int64_t total, const Worker& w) const {
  const Groups& all = *at<Groups>(w, layout_.groups);
  const int64_t work = total * (rows_of_reading * all.num_jobs + all.num_pairs);
  const int64_t row_of_longest = (rows_of_reading + all.longest) * std::max(all.num_jobs, 1);
  return std::max(least_most, work / (row_of_longest * parts_of_share * w.count));
}

// Calls run_slice(job, begin, end) for every slice of `num_rows` weight rows of every job.
template <typename F>
void RoutedExpertsOp::for_each_slice(int64_t num_rows, int rows, Worker& w, F&& run_slice) const {
  const int64_t total = at<Groups>(w, layout_.groups)->num_jobs * num_rows;
  const bool has_long_jobs = rows > gemv_max_rows;
  ShrinkingSlices slices(total, w.count, has_long_jobs ? 32 : 8, has_long_jobs ? most_rows(total, w) : total);
  for (auto next = slices.of(w.take()); !next.is_empty(); next = slices.of(w.take())) {
    for (int64_t first = next.begin, end; first < next.end; first = end) {
      const Job& job = at<Job>(w, layout_.jobs)[first / num_rows];
      const int64_t begin = first % num_rows,
                    count = std::min({kept_values / job.count, num_rows - begin, next.end - first});
      run_slice(job, begin, begin + count);
      end = first + count;
    }
  }
}

void RoutedExpertsOp::gate_up(int rows, Worker& w) const {
  for_each_slice(args_.gate.num_rows, rows, w,
                 [&](const Job& j, int64_t begin, int64_t end) { gate_up_slice(j, begin, end, w); });
}

void RoutedExpertsOp::gate_up_slice(const Job& j, int64_t begin, int64_t end, Worker& w) const {
  const float* x[pass_rows];
  float *gate[pass_rows] = {}, *up[pass_rows] = {};
  auto* values = reinterpret_cast<float*>(w.memory->data());
  std::byte* memory = w.memory->data() + 2 * kept_values * sizeof(float);
  for (int r = 0; r < j.count; r++) {
    const int64_t token = token_of(w, j.first_pair + r);
    x[r] = args_.x.row(token);
    gate[r] = values + r * (end - begin);
    up[r] = values + kept_values + r * (end - begin);
  }
  const auto multiply_x = [&](const Weight& matrix, float* const* out) {
    const ActivationTile* tiles = x_tiles(w, j, matrix.type);
    ActivationRow q[pass_rows];
    if (tiles == nullptr && quant_is_integer(matrix.type)) {
      for (int r = 0; r < j.count; r++) q[r] = x_row(w, token_of(w, j.first_pair + r), form_of(matrix.type));
    }
    multiply(kernels_, slice_of(matrix, j.expert, begin, end), {x, q, tiles, out, j.count}, memory);
  };
  multiply_x(args_.gate, gate);
  multiply_x(args_.up, up);
  auto* hidden = at<float>(w, layout_.hidden);
  for (int r = 0; r < j.count; r++) {
    args_.glu.apply(kernels_, j.expert * args_.gate.num_rows + begin, end - begin, gate[r], up[r],
                    hidden + (j.first_pair + r) * args_.gate.num_rows + begin);
  }
}

void RoutedExpertsOp::quantize_hidden(Worker& w) const {
  if (!h_forms_.any()) return;
  const int64_t cols = args_.down.num_cols;
  for (int64_t i = w.take(); i < at<Groups>(w, layout_.groups)->num_tiles; i = w.take()) {
    const Tile& next = at<Tile>(w, layout_.tiles)[i];
    ActivationRow rows[tile_rows];
    for (int r = 0; r < next.count; r++) {
      rows[r] = h_row(w, next.first_pair + r);
      kernels_.quantize_row(hidden_row(w, next.first_pair + r), cols, rows[r]);
    }
    if (is_tiled(at<Job>(w, layout_.jobs)[next.job], args_.down.type)) {
      kernels_.pack(rows, next.count, cols, at<ActivationTile>(w, layout_.h_tiles) + i * num_groups(cols));
    }
  }
}

void RoutedExpertsOp::down(int rows, Worker& w) const {
  for_each_slice(args_.down.num_rows, rows, w,
                 [&](const Job& j, int64_t begin, int64_t end) { down_slice(j, begin, end, w); });
}

void RoutedExpertsOp::down_slice(const Job& j, int64_t begin, int64_t end, Worker& w) const {
  const float* x[pass_rows];
  ActivationRow q[pass_rows];
  float* out[pass_rows] = {};
  for (int r = 0; r < j.count; r++) {
    const int64_t pair = j.first_pair + r, source = at<int32_t>(w, layout_.pairs)[pair];
    x[r] = hidden_row(w, pair);
    if (h_forms_.any()) q[r] = h_row(w, pair);
    out[r] = args_.out + source / args_.num_experts_per_tok * args_.out_row_stride +
             source % args_.num_experts_per_tok * args_.out_rank_stride + begin;
  }
  const ActivationTile* tiles = nullptr;
  if (is_tiled(j, args_.down.type))
    tiles = at<ActivationTile>(w, layout_.h_tiles) + j.first_tile * num_groups(args_.down.num_cols);
  multiply(kernels_, slice_of(args_.down, j.expert, begin, end), {x, q, tiles, out, j.count},
           w.memory->data());
}

}  // namespace coldstream
