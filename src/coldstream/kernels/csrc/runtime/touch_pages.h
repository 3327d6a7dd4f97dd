// Reads one byte of every page of a range of a mapped file, so that loading can show progress and later reads
// do not wait for the disk.
#pragma once

#include "runtime/mapped_file.h"
#include "runtime/op.h"

namespace coldstream {

class TouchPages : public Op {
 public:
  // The range must lie inside the file, otherwise std::invalid_argument.
  TouchPages(std::shared_ptr<MappedFile> file, uint64_t offset, uint64_t num_bytes);
  const char* name() const override { return "touch_pages"; }
  void run(int stage, int rows, Worker& w) override;

 private:
  std::shared_ptr<MappedFile> file_;
  uint64_t begin_, end_;
};

}  // namespace coldstream
