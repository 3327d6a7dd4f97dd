#include "quant/read_ahead.h"

#include <unistd.h>

#include <algorithm>

namespace coldstream {

namespace {

// Half of a core's second-level cache: what is being multiplied has the other half.
int64_t half_of_cache() {
  constexpr int64_t usual = 1 << 19;
#ifdef _SC_LEVEL2_CACHE_SIZE
  const int64_t known = sysconf(_SC_LEVEL2_CACHE_SIZE) / 2;
  return known > 0 ? known : usual;
#else
  return usual;
#endif
}

}  // namespace

ReadAhead::ReadAhead(int num_workers)
    : num_workers_(num_workers), most_bytes_(half_of_cache()), cursors_(new Cursor[num_workers]) {}

void ReadAhead::forget_first(int count) {
  std::move(layers_ + count, layers_ + count_, layers_);
  count_ -= count;
}

void ReadAhead::expect(uint32_t layer, const Weight& gate, const Weight& up, const Weight& down,
                       const ExpertList& experts) {
  if (experts.count == 0) return;
  if (count_ == max_layers) forget_first(1);
  const int64_t bytes = gate.num_rows * (gate.row_bytes + up.row_bytes) + down.num_rows * down.row_bytes;
  layers_[count_++] = {++last_serial_, layer, &gate, &up, &down, experts, experts.count * bytes};
}

void ReadAhead::forget(uint32_t layer) {
  // From the back: what an earlier token's layer expected may still be there, as nobody asked for it.
  for (int i = count_; i > 0; i--) {
    if (layers_[i - 1].number == layer) return forget_first(i);
  }
}

int64_t ReadAhead::num_bytes() const {
  int64_t sum = 0;
  for (int i = 0; i < num_workers_; i++) sum += cursors_[i].all_bytes;
  return sum;
}

ReadAhead::Bytes ReadAhead::next(const Worker& w, int64_t most) {
  Cursor& at = cursors_[w.index];
  int64_t waiting_bytes = 0;
  for (int i = 0; i < count_; i++) {
    const Layer& layer = layers_[i];
    if (layer.serial > at.serial) at = {.serial = layer.serial, .all_bytes = at.all_bytes};
    if (layer.serial == at.serial) {
      if (waiting_bytes + at.num_bytes >= most_bytes_) break;
      const Bytes found = next_of(layer, w, at, most);
      if (found.data != nullptr) return found;
    }
    waiting_bytes += layer.num_bytes / w.count;
  }
  return {nullptr, 0};
}

ReadAhead::Bytes ReadAhead::next_of(const Layer& layer, const Worker& w, Cursor& at, int64_t most) {
  for (; at.stage < num_stages; at.stage++, at.unit = 0) {
    const ExpertSlices slices(layer.experts.count, (at.stage == 0 ? layer.gate : layer.down)->num_rows,
                              w.count);
    const int64_t end = slices.share_of(w.index + 1);
    at.unit = std::max(at.unit, slices.share_of(w.index));
    if (at.unit >= end) continue;
    const ExpertSlices::Rows rows = slices.rows_at(at.unit, end);
    const Weight& weight = at.stage == 1 ? *layer.down : at.matrix == 0 ? *layer.gate : *layer.up;
    const int64_t size = (rows.end - rows.begin) * weight.row_bytes;
    if (at.offset >= size) at.offset = 0;  // other shares than before, as there are other workers
    const Bytes found = {weight.row(layer.experts.ids[rows.job], rows.begin) + at.offset,
                         std::min(most, size - at.offset)};
    at.num_bytes += found.size;
    at.all_bytes += found.size;
    at.offset += found.size;
    if (at.offset == size) {
      const bool is_last = at.stage == 1 || at.matrix == 1;
      at.offset = 0;
      at.matrix = is_last ? 0 : 1;
      if (is_last) at.unit = rows.next;
    }
    return found;
  }
  return {nullptr, 0};
}

void ReadAheadOp::run(int /*stage*/, int /*rows*/, Worker& w) {
  constexpr int64_t line = 64, at_once = 64 * line;
  while (!is_ended_()) {
    const ReadAhead::Bytes found = ahead_.next(w, at_once);
    if (found.data == nullptr) return;
    for (int64_t i = 0; i < found.size; i += line) __builtin_prefetch(found.data + i, 0, 2);
  }
}

}  // namespace coldstream
