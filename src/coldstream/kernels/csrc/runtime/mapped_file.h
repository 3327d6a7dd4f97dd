// A model file mapped read-only. Its bytes are touched only by ops running under a graph, where a vanished
// page (the file shrank) becomes ModelChangedError instead of a dead process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace coldstream {

class GuardedRegion;

// Page size, the unit in which a mapping is read and protected.
uint64_t page_bytes();

struct ModelChangedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class MappedFile {
 public:
  // Maps the first `size` bytes of an open descriptor (which is not kept); `name` is what errors call the
  // file. Throws std::system_error, std::invalid_argument for size 0, ModelChangedError if the file is
  // shorter than `size`.
  MappedFile(int fd, uint64_t size, std::string name = "the model file");
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();
  const uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  // Throws std::invalid_argument unless the range lies inside the mapping.
  void check_range(uint64_t offset, uint64_t num_bytes) const;
  // Asks the system to read the range from the disk soon. Only advice: it does not show whether the bytes
  // can be read or the file still has them. Throws std::invalid_argument as `check_range`.
  void read_ahead(uint64_t offset, uint64_t num_bytes) const;

 private:
  const uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
  std::unique_ptr<GuardedRegion> guard_;
};

}  // namespace coldstream
