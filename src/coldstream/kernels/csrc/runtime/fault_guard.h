// Reports a page of a mapped file that cannot be read (the file shrank, its disk failed) as a value instead
// of SIGBUS. The list of mappings and the handler are global, as a signal has no other context.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/op.h"

namespace coldstream {

// A region whose faults are caught, from construction to destruction. Installs the handler on first use; it
// passes faults outside of all regions, or outside of a guarded stage, on to the previous handler.
class GuardedRegion {
 public:
  GuardedRegion(const void* begin, size_t size, std::string name);
  GuardedRegion(const GuardedRegion&) = delete;
  GuardedRegion& operator=(const GuardedRegion&) = delete;
  ~GuardedRegion();

 private:
  struct RegionEntry* entry_;
};

// Runs one stage on the calling thread; returns the address inside a guarded region that could not be read,
// or null.
const void* run_guarded(Op& next, int stage, int rows, Worker& w);

// The file and byte of `address`, a result of `run_guarded`, as text.
std::string describe_fault(const void* address);

}  // namespace coldstream
