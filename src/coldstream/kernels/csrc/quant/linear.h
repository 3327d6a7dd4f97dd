// x times several weight matrices: x is quantised once for all of them, or for all of a form.
#pragma once

#include <vector>

#include "quant/products.h"
#include "quant/weight.h"
#include "runtime/op.h"

namespace coldstream {

// float32 rows; `stride` in floats.
struct float_rows_in {
  const float* data;
  int64_t stride;
  const float* row(int64_t t) const { return data + t * stride; }
};

struct float_rows_out {
  float* data;
  int64_t stride;
  float* row(int64_t t) const { return data + t * stride; }
};

struct linear_part {
  weight w;
  float_rows_out out;
};

class linear_op : public op {
 public:
  // All weights have `cols` inputs and one matrix; all buffers hold `capacity` rows.
  linear_op(const quant_kernels& kernels, float_rows_in x, int64_t cols, std::vector<linear_part> parts,
            int capacity);
  const char* name() const override { return "linear"; }
  int num_stages() const override { return quantizes_apart() ? 2 : 1; }
  size_t scratch_bytes() const override;
  size_t shared_bytes() const override;
  void run(int stage, int rows, worker& w) override;
  bool runs_alone(int stage, int rows) const override;

 private:
  bool quantizes_apart() const;
  void quantize(int rows, worker& w) const;
  void multiply_slices(int rows, worker& w) const;
  void multiply_range(int64_t begin, int64_t end, int rows, std::byte* quantized, std::byte* memory,
                      worker& w) const;
  void quantize_row(int64_t t, std::byte* memory) const;
  void quantize_tile(int64_t tile, int rows, activation_form form, worker& w) const;
  activation_tile* tiles_of(activation_form form, int rows, worker& w) const;
  void multiply_slice(const linear_part& part, int64_t begin, int64_t end, int first_row, int num_rows,
                      const activation_tile* tiles, std::byte* quantized, std::byte* memory) const;

  const quant_kernels& kernels_;
  float_rows_in x_;
  int64_t cols_;
  std::vector<linear_part> parts_;
  int capacity_;
  int64_t total_rows_;
  activation_forms forms_;
};

}  // namespace coldstream
