// Which slot of a pool gets the next expert, and which keeps its own.
#include <algorithm>
#include <stdexcept>

#include "quant/expert_pool.h"

namespace coldstream {

std::vector<int64_t> ExpertPool::owners(int size_class) const {
  std::lock_guard lock(mutex_);
  const auto& of = classes_[size_class];
  std::vector<int64_t> result(of.num_slots);
  for (int i = 0; i < of.num_slots; i++) result[i] = of.slots[i].owner;
  return result;
}

void ExpertPool::set_order(int size_class, const std::vector<int>& order) {
  auto& of = classes_[size_class];
  for (int index : order) {
    if (index < 0 || index >= of.num_slots) {
      throw std::invalid_argument("the order names no slot of this size");
    }
  }
  std::lock_guard lock(mutex_);
  of.order = order;
  of.next = 0;
}

// The slot of an expert, or -1.
int ExpertPool::index_of(int layer, int32_t expert) const {
  if (layer < 0 || layer >= num_layers() || expert < 0 || expert >= num_experts_) {
    throw std::out_of_range("layer " + std::to_string(layer) + " of the pool has no expert " +
                            std::to_string(expert));
  }
  return slot_of_[int64_t{layer} * num_experts_ + expert];
}

std::vector<const uint8_t*> ExpertPool::hold(int layer, int32_t expert) {
  std::lock_guard lock(mutex_);
  const int index = index_of(layer, expert);
  if (index < 0 || addresses(layer, 0)[expert] == nullptr) return {};
  SizeClass& of = classes_[layers_[layer].size_class];
  Slot& held = of.slots[index];
  if (held.num_holds == 0) {
    // A step must find slots that it may overwrite, or it would wait for whoever holds them.
    if (of.num_slots - of.num_held <= of.max_staging) return {};
    of.num_held++;
    if (held.is_staging) {
      held.is_staging = false;
      of.num_staging--;
      std::erase(of.staging, index);
    }
  }
  held.num_holds++;
  std::vector<const uint8_t*> parts;
  for (size_t i = 0; i < layers_[layer].parts.size(); i++) {
    parts.push_back(addresses(layer, static_cast<int>(i))[expert]);
  }
  return parts;
}

void ExpertPool::release(int layer, int32_t expert) {
  std::lock_guard lock(mutex_);
  const int index = index_of(layer, expert);
  SizeClass& of = classes_[layers_[layer].size_class];
  if (index < 0 || of.slots[index].num_holds == 0) throw std::invalid_argument("the expert is not held");
  if (--of.slots[index].num_holds == 0) of.num_held--;
}

std::optional<ExpertPool::Reserved> ExpertPool::reserve(int layer, int32_t expert, size_t num_worse) {
  std::lock_guard lock(mutex_);
  if (index_of(layer, expert) >= 0) return std::nullopt;
  SizeClass& of = classes_[layers_[layer].size_class];
  if (of.num_slots - of.num_held <= of.max_staging) return std::nullopt;
  int index = take_free(of);
  if (index < 0) index = take_in_order(of, false, num_worse);
  if (index < 0) return std::nullopt;
  Slot& to = of.slots[index];
  evict(to);
  to.is_reserved = true;
  of.num_held++;
  Reserved found = {index, {}};
  for_parts(layer, expert, to.memory, [&](size_t, uint8_t* address) { found.parts.push_back(address); });
  return found;
}

void ExpertPool::deliver(int layer, int32_t expert, int slot, bool is_whole) {
  std::lock_guard lock(mutex_);
  const bool is_there = index_of(layer, expert) >= 0;
  SizeClass& of = classes_[layers_[layer].size_class];
  if (slot < 0 || slot >= of.num_slots || !of.slots[slot].is_reserved) {
    throw std::invalid_argument("the slot is not reserved");
  }
  Slot& to = of.slots[slot];
  to.is_reserved = false;
  of.num_held--;
  if (!is_whole || is_there) return of.free.push_back(slot);
  to.owner = int64_t{layer} * num_experts_ + expert;
  slot_of_[to.owner] = slot;
  layers_[layer].num_resident++;
  publish(layer, expert);
}

// A slot for the running layer, or -1 if there is none until some of its experts are computed.
int ExpertPool::take_slot() {
  SizeClass& of = current();
  if (is_prefill_ && !layers_[layer_].is_kept) {
    // While the pool fills, every layer gets an equal share.
    const bool has_share = layers_[layer_].num_resident < std::max(1, of.num_slots / of.num_layers);
    const int index = has_share ? take_free(of) : -1;
    return index >= 0 ? index : take_staging(of);
  }
  int index = take_free(of);
  if (index < 0) index = take_in_order(of, true, of.order.size());
  if (index < 0) index = take_any(of);
  return index < 0 && is_prefill_ ? take_staging(of) : index;
}

int ExpertPool::take_staging(SizeClass& of) {
  if (!of.staging.empty()) {
    const int index = of.staging.back();
    of.staging.pop_back();
    return index;
  }
  if (of.num_staging == of.max_staging) return -1;
  int index = take_free(of);
  if (index < 0) index = take_in_order(of, false, of.order.size());
  if (index < 0) index = take_any(of);
  if (index < 0) return -1;
  of.slots[index].is_staging = true;
  of.num_staging++;
  return index;
}

int ExpertPool::take_free(SizeClass& of) {
  if (of.free.empty()) return -1;
  const int index = of.free.back();
  of.free.pop_back();
  return index;
}

// spare_used: not from experts that this step has used, as the next step likely uses them too.
int ExpertPool::take_in_order(SizeClass& of, bool spare_used, size_t end) {
  while (of.next < std::min(end, of.order.size())) {
    const int index = of.order[of.next++];
    const Slot& from = of.slots[index];
    const bool is_free = from.owner < 0;
    if (!is_free && may_overwrite(from) && !(spare_used && from.used_step == step_)) return index;
  }
  return -1;
}

int ExpertPool::take_any(SizeClass& of) {
  for (const bool spare_used : {true, false}) {
    for (int i = 0; i < of.num_slots; i++) {
      of.hand = (of.hand + 1) % of.num_slots;
      const Slot& from = of.slots[of.hand];
      if (may_overwrite(from) && !(spare_used && from.used_step == step_)) return of.hand;
    }
  }
  return -1;
}

}  // namespace coldstream
