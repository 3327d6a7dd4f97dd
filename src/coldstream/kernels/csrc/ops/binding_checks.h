// What the bindings of the float32 ops share: shapes and strides are checked here, once.
#pragma once

#include "bindings.h"

#include "ops/float_ops.h"

namespace coldstream {

using Array1d = nb::ndarray<float, nb::ndim<1>, nb::device::cpu>;
using Array3d = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Doubles1d = nb::ndarray<double, nb::ndim<1>, nb::device::cpu>;
using Ids1d = nb::ndarray<int32_t, nb::ndim<1>, nb::device::cpu>;
using Ids2d = nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu>;
using State3d = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

template <typename A>
int64_t size_of(const A& array, size_t dim) {
  return static_cast<int64_t>(array.shape(dim));
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// The array must have this shape, unit stride in its last dimension, and rows that do not overlap.
template <typename A>
void check(const A& array, const char* name, const std::vector<int64_t>& shape) {
  std::vector<int64_t> actual;
  for (size_t i = 0; i < array.ndim(); i++) actual.push_back(size_of(array, i));
  if (actual != shape) {
    refuse(std::string(name) + " must be " + shape_text(shape) + ", not " + shape_text(actual));
  }
  int64_t extent = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    const bool last = i + 1 == array.ndim();
    if (shape[i] > 1 && (last ? array.stride(i) != 1 : array.stride(i) < extent)) {
      refuse(std::string(name) + " must have unit stride in its last dimension and rows that do not overlap");
    }
    extent = last ? shape[i] : array.stride(i) * shape[i];
  }
}

template <typename A>
void check_contiguous(const A& array, const char* name, const std::vector<int64_t>& shape) {
  check(array, name, shape);
  int64_t extent = 1;
  for (size_t i = array.ndim(); i-- > 0; extent *= shape[i]) {
    if (shape[i] > 1 && array.stride(i) != extent) refuse(std::string(name) + " must be contiguous");
  }
}

inline InputRows input(const Array2d& array, const char* name, int64_t rows, int64_t cols) {
  check(array, name, {rows, cols});
  return {array.data(), array.stride(0)};
}

inline OutputRows output(const Array2d& array, const char* name, int64_t rows, int64_t cols) {
  check(array, name, {rows, cols});
  return {array.data(), array.stride(0)};
}

inline const float* vector(const Array1d& array, const char* name, int64_t size) {
  check(array, name, {size});
  return array.data();
}

inline const int32_t* ids(const Ids1d& array, const char* name, int64_t size) {
  check(array, name, {size});
  return array.data();
}

// A field of a record of ops.py. Arrays are not converted: they are read where they lie.
template <typename T>
T field(const nb::object& record, const char* name, bool converts = false) {
  T value;
  if (!nb::try_cast(record.attr(name), value, converts))
    refuse(std::string(name) + " has a wrong type or shape");
  return value;
}

inline void check_block_size(int64_t block_size) {
  const bool is_power = (block_size & (block_size - 1)) == 0;
  if (block_size < min_chosen_block || block_size > max_chosen_block || !is_power) {
    refuse("blocks of " + std::to_string(block_size) + " positions: they may have 4, 8, 16, 32 or 64");
  }
}

// `BatchRows` of kernels/ops.py; the creator of a graph keeps its arrays alive.
struct BatchRows {
  Ids1d segments;
  Ids2d tables;
  Ids1d indices, parents, kept;
};

inline RowLayout layout_of(const int32_t* positions, const int32_t* state_ids, const BatchRows* rows,
                           int64_t num_rows) {
  RowLayout layout = {positions, state_ids};
  if (rows == nullptr) return layout;
  const int64_t num_segments = size_of(rows->tables, 0), num_blocks = size_of(rows->tables, 1);
  check_contiguous(rows->tables, "tables", {num_segments, num_blocks});
  layout.batch = {
      .segments = ids(rows->segments, "segments", num_rows),
      .tables = rows->tables.data(),
      .num_segments = num_segments,
      .num_blocks = num_blocks,
      .indices = ids(rows->indices, "indices", num_rows),
      .parents = ids(rows->parents, "parents", num_rows),
      .kept = ids(rows->kept, "kept", num_rows),
  };
  return layout;
}

template <typename... A>
void submit_with(Runtime& rt, std::unique_ptr<Op> next, int64_t rows, const A&... arrays) {
  if (rows > INT32_MAX / 1024) refuse(std::to_string(rows) + " rows are more than one call takes");
  submit(rt, std::move(next), static_cast<int>(rows), {keep(arrays)...});
}

inline const FloatKernels& kernels_of(const Runtime& rt) { return float_kernels_for(rt.active_tier()); }

}  // namespace coldstream
