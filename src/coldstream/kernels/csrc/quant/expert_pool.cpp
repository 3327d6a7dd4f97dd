#include "quant/expert_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>

namespace coldstream {

namespace {

constexpr const char* read_failed = "experts could not be read";
constexpr const char* no_slots = "the pool has no slots: call allocate first";
constexpr const char* bad_id = "an expert id lies outside the experts of the layer";

}  // namespace

ExpertPool::ExpertPool(std::unique_ptr<FileReader> reader, std::vector<std::vector<Part>> layers,
                       int num_experts)
    : reader_(std::move(reader)), num_experts_(num_experts) {
  if (layers.empty() || num_experts < 1) throw std::invalid_argument("a pool needs layers and experts");
  for (auto& parts : layers) {
    if (parts.empty()) throw std::invalid_argument("a layer of a pool needs parts");
    uint64_t bytes = 0;
    for (const Part& p : parts) {
      uint64_t all, end;
      if (p.bytes < 1 || __builtin_mul_overflow(p.bytes, static_cast<uint64_t>(num_experts), &all) ||
          __builtin_add_overflow(p.offset, all, &end) || end > INT64_MAX / 2) {
        throw std::invalid_argument("the experts of a layer do not fit into 63 bits");
      }
      bytes += room_of(p);
    }
    const auto found = std::find(slot_bytes_.begin(), slot_bytes_.end(), bytes);
    const int size_class = static_cast<int>(found - slot_bytes_.begin());
    if (found == slot_bytes_.end()) {
      slot_bytes_.push_back(bytes);
      classes_.emplace_back().bytes = bytes;
    }
    classes_[size_class].num_layers++;
    const size_t num_addresses = parts.size() * static_cast<size_t>(num_experts);
    layers_.push_back({std::move(parts), size_class, std::vector<const uint8_t*>(num_addresses)});
  }
  slot_of_.assign(layers_.size() * static_cast<size_t>(num_experts), -1);
  counts_.assign(num_experts, 0);
  pass_of_.assign(num_experts, -1);
  for (auto* list : {&missing_, &loading_, &in_pass_}) list->reserve(num_experts);
  used_.reserve(slot_of_.size());
}

ExpertPool::~ExpertPool() {
  reader_.reset();  // before the memory that it reads into
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

const uint8_t* const* ExpertPool::addresses(int layer, int index) const {
  return layers_[layer].addresses.data() + static_cast<int64_t>(index) * num_experts_;
}

int ExpertPool::layer_of(const uint8_t* const* table) const {
  for (int layer = 0; layer < num_layers(); layer++) {
    const int num_parts = static_cast<int>(layers_[layer].parts.size());
    for (int i = 0; i < num_parts; i++) {
      if (table == addresses(layer, i)) return layer;
    }
  }
  return -1;
}

void ExpertPool::allocate(const std::vector<int>& num_slots, int num_staging) {
  if (memory_ != nullptr) throw std::invalid_argument("the slots of this pool have been allocated");
  if (num_slots.size() != classes_.size() || num_staging < 1) {
    throw std::invalid_argument("a pool needs a number of slots for each size, and at least one to stage in");
  }
  uint64_t total = 0;
  for (size_t c = 0; c < classes_.size(); c++) {
    if (num_slots[c] < 1) throw std::invalid_argument("a pool needs at least one slot of each size");
    uint64_t bytes;
    if (__builtin_mul_overflow(classes_[c].bytes, static_cast<uint64_t>(num_slots[c]), &bytes) ||
        __builtin_add_overflow(total, bytes, &total)) {
      throw std::bad_alloc();
    }
  }
  memory_bytes_ = total;
  void* memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = memory;
  madvise(memory_, memory_bytes_, MADV_HUGEPAGE);
  auto* next = static_cast<std::byte*>(memory_);
  for (size_t c = 0; c < classes_.size(); c++) {
    SizeClass& of = classes_[c];
    of.num_slots = num_slots[c];
    of.max_staging = std::min(num_staging, of.num_slots);
    of.slots = std::make_unique<Slot[]>(of.num_slots);
    for (int i = 0; i < of.num_slots; i++, next += of.bytes) {
      of.slots[i].memory = next;
      of.free.push_back(of.num_slots - 1 - i);
    }
    of.staging.reserve(of.num_slots);
  }
}

void ExpertPool::follow(int layer, bool is_prefill) {
  if (layer <= layer_ || is_prefill != is_prefill_ || step_ == 0 || reader_->failed()) begin_step(is_prefill);
}

void ExpertPool::begin_step(bool is_prefill) {
  settle();
  std::lock_guard lock(mutex_);
  step_++;
  is_prefill_ = is_prefill;
  used_.clear();
  for (SizeClass& of : classes_) {
    of.next = 0;
    of.num_staging = 0;
    of.staging.clear();
    for (int i = 0; i < of.num_slots; i++) of.slots[i].is_staging = false;
  }
}

// Ends reads that a failed step has left, and frees their slots.
void ExpertPool::settle() {
  reader_->settle();
  std::lock_guard lock(mutex_);
  for (int32_t expert : loading_) {
    Slot& from = slot_with(expert);
    from.is_pinned = false;
    from.pending = 0;
    current().free.push_back(slot_of_[number(expert)]);
    evict(from);
  }
  missing_.clear();
  loading_.clear();
  release_pass();
}

void ExpertPool::clear() {
  settle();
  std::lock_guard lock(mutex_);
  for (SizeClass& of : classes_) {
    for (int i = 0; i < of.num_slots; i++) {
      if (of.slots[i].owner < 0 || of.slots[i].num_holds > 0) continue;
      evict(of.slots[i]);
      of.free.push_back(i);
    }
  }
}

const char* ExpertPool::preload(int layer, const std::vector<int32_t>& experts) {
  if (memory_ == nullptr) return no_slots;
  layers_.at(layer);
  settle();
  layer_ = layer;
  for (int32_t expert : experts) {
    if (expert < 0 || expert >= num_experts_) return bad_id;
  }
  std::unique_lock lock(mutex_);
  for (int32_t expert : experts) {
    if (slot_of_[number(expert)] >= 0) continue;
    const int index = take_free(current());
    if (index < 0) return "the layer's size has no free slot left";
    load(expert, index);
  }
  lock.unlock();
  reader_->wait([&] {
    return std::all_of(loading_.begin(), loading_.end(), [&](int32_t e) { return has_arrived(e); });
  });
  if (reader_->failed()) return read_failed;
  lock.lock();
  for (int32_t expert : loading_) {
    publish(layer, expert);
    slot_with(expert).is_pinned = false;
  }
  loading_.clear();
  return nullptr;
}

void ExpertPool::keep(int layer) { layers_.at(layer).is_kept = true; }

const char* ExpertPool::request(int layer, const int32_t* ids, int rows, int ranks, int64_t stride) {
  std::lock_guard lock(mutex_);
  release_pass();
  end_pass();
  if (memory_ == nullptr) return no_slots;
  if (reader_->failed()) return read_failed;
  for (int t = 0; t < rows; t++) {
    for (int k = 0; k < ranks; k++) {
      const int32_t id = ids[t * stride + k];
      if (id < -1 || id >= num_experts_) return bad_id;
    }
  }
  layer_ = layer;
  num_passes_ = 0;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int t = 0; t < rows; t++) {
    for (int k = 0; k < ranks; k++) {
      const int32_t id = ids[t * stride + k];
      if (id < 0 || counts_[id]++ > 0) continue;
      used_.push_back(number(id));
      if (slot_of_[number(id)] < 0) {
        missing_.push_back(id);
        continue;
      }
      pin(id);
    }
  }
  counters_.hits += in_pass_.size();
  counters_.misses += missing_.size();
  // Those with the most rows first, as the first reads of a prompt fill free slots and stay there.
  std::sort(missing_.begin(), missing_.end(),
            [&](int32_t a, int32_t b) { return counts_[a] != counts_[b] ? counts_[a] < counts_[b] : a > b; });
  load_missing();
  return nullptr;
}

const char* ExpertPool::next_pass() {
  std::unique_lock lock(mutex_);
  if (num_passes_++ > 0) {
    release_pass();
    load_missing();
  }
  pass_++;
  const auto arrived = [&](int32_t expert) { return has_arrived(expert); };
  if (in_pass_.empty() && !loading_.empty()) {
    const auto started = std::chrono::steady_clock::now();
    lock.unlock();
    reader_->wait([&] { return std::any_of(loading_.begin(), loading_.end(), arrived); });
    lock.lock();
    counters_.wait_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  }
  const auto first = std::stable_partition(loading_.begin(), loading_.end(), std::not_fn(arrived));
  for (auto next = first; next != loading_.end(); ++next) publish(layer_, *next);
  in_pass_.insert(in_pass_.end(), first, loading_.end());
  loading_.erase(first, loading_.end());
  for (int32_t expert : in_pass_) pass_of_[expert] = pass_;
  is_chosen_.store(1, std::memory_order_release);
  is_chosen_.notify_all();
  return reader_->failed() ? read_failed : nullptr;
}

// Unpins the experts that have been computed.
void ExpertPool::release_pass() {
  for (int32_t expert : in_pass_) {
    Slot& from = slot_with(expert);
    from.is_pinned = false;
    if (from.is_staging) current().staging.push_back(slot_of_[number(expert)]);
  }
  in_pass_.clear();
}

// Has an expert in memory computed in the next pass.
void ExpertPool::pin(int32_t expert) {
  slot_with(expert).is_pinned = true;
  slot_with(expert).used_step = step_;
  in_pass_.push_back(expert);
}

void ExpertPool::load_missing() {
  while (!missing_.empty()) {
    const int32_t expert = missing_.back();
    if (slot_of_[number(expert)] >= 0) {  // delivered since it was requested
      pin(expert);
    } else {
      const int index = take_slot();
      if (index < 0) return;
      load(expert, index);
    }
    missing_.pop_back();
  }
}

void ExpertPool::load(int32_t expert, int index) {
  Slot& to = current().slots[index];
  evict(to);
  to.owner = number(expert);
  to.used_step = step_;
  to.is_pinned = true;
  slot_of_[to.owner] = index;
  Layer& of = layers_[layer_];
  of.num_resident++;
  to.pending.store(static_cast<int>(of.parts.size()), std::memory_order_relaxed);
  loading_.push_back(expert);
  std::byte* memory = to.memory;
  for (const Part& p : of.parts) {
    const uint64_t begin = p.offset + static_cast<uint64_t>(expert) * p.bytes;
    reader_->submit({p.file, begin, begin + p.bytes, memory, &to.pending});
    memory += room_of(p);
  }
}

void ExpertPool::evict(Slot& from) {
  if (from.owner < 0) return;
  Layer& of = layers_[from.owner / num_experts_];
  const int64_t expert = from.owner % num_experts_;
  for (size_t i = 0; i < of.parts.size(); i++) of.addresses[i * num_experts_ + expert] = nullptr;
  slot_of_[from.owner] = -1;
  of.num_resident--;
  from.owner = -1;
}

// Enters where the bytes of an expert are, which are all in its slot.
void ExpertPool::publish(int layer, int32_t expert) {
  Layer& of = layers_[layer];
  const int64_t owner = int64_t{layer} * num_experts_ + expert;
  for_parts(layer, expert, classes_[of.size_class].slots[slot_of_[owner]].memory,
            [&](size_t i, const uint8_t* address) { of.addresses[i * num_experts_ + expert] = address; });
}

}  // namespace coldstream
