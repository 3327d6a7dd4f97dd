// x times several weight matrices: x is quantised once for all of them, or for all of a form.
#pragma once

#include <vector>

#include "quant/products.h"
#include "quant/weight.h"
#include "runtime/op.h"

namespace coldstream {

// float32 rows; `stride` in floats.
struct FloatRowsIn {
  const float* data;
  int64_t stride;
  const float* row(int64_t t) const { return data + t * stride; }
};

struct FloatRowsOut {
  float* data;
  int64_t stride;
  float* row(int64_t t) const { return data + t * stride; }
};

struct LinearPart {
  Weight w;
  FloatRowsOut out;
};

class LinearOp : public Op {
 public:
  // All weights have `cols` inputs and one matrix; all buffers hold `capacity` rows.
  LinearOp(const QuantKernels& kernels, FloatRowsIn x, int64_t cols, std::vector<LinearPart> parts,
           int capacity);
  const char* name() const override { return "linear"; }
  int num_stages() const override { return quantizes_apart() ? 2 : 1; }
  size_t scratch_bytes() const override { return scratch_bytes_; }
  size_t shared_bytes() const override { return shared_bytes_; }
  void run(int stage, int rows, Worker& w) override;
  bool runs_alone(int stage, int rows) const override;

 private:
  // Whether so many rows are packed into tiles for the weights of this part, of any part, and whether they
  // are read as rows by an integer one.
  bool is_tiled(const LinearPart& part, int rows) const;
  bool has_tiled(int rows) const;
  bool has_untiled(int rows) const;
  bool quantizes_apart() const;
  size_t count_scratch_bytes() const;
  size_t count_shared_bytes() const;
  size_t tile_bytes(int rows) const;
  void quantize(int rows, Worker& w) const;
  void multiply_slices(int rows, Worker& w) const;
  void multiply_range(int64_t begin, int64_t end, int rows, std::byte* quantized, std::byte* memory,
                      Worker& w) const;
  void quantize_row(int64_t t, std::byte* memory) const;
  void quantize_tile(int64_t tile, int rows, ActivationForm form, Worker& w) const;
  ActivationTile* tiles_of(ActivationForm form, int rows, Worker& w) const;
  std::byte* rows_of(int rows, Worker& w) const;
  void multiply_slice(const LinearPart& part, int64_t begin, int64_t end, int first_row, int num_rows,
                      const ActivationTile* tiles, std::byte* quantized, std::byte* memory) const;

  const QuantKernels& kernels_;
  FloatRowsIn x_;
  int64_t cols_;
  std::vector<LinearPart> parts_;
  int capacity_;
  int64_t total_rows_;
  ActivationForms forms_;
  // Counted once, as each run of a graph asks all of its ops.
  size_t scratch_bytes_, shared_bytes_;
};

}  // namespace coldstream
