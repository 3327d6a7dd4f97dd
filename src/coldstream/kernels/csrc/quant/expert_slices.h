// The tasks of a stage of few experts: as many weight rows of all jobs for each worker, one after the other,
// in one part for few jobs and in two for more, so that the others can help a worker that is late. A job has
// one expert.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/op.h"

namespace coldstream {

class ExpertSlices {
 public:
  static constexpr int64_t max_slice = 64;  // weight rows of a task; bounds the values kept in private memory

  ExpertSlices(int num_jobs, int64_t num_rows, int num_workers)
      : num_rows_(num_rows),
        units_of_job_(ceil_div(num_rows, slice_multiple)),
        units_(num_jobs * units_of_job_),
        num_workers_(num_workers) {
    const int64_t fewest = ceil_div(units_ * slice_multiple, num_workers * max_slice);
    const int64_t parts = num_workers * std::max<int64_t>(num_jobs <= 2 ? 1 : 2, fewest);
    num_tasks_ = std::min(parts, ceil_div(units_, least_units));
  }

  // Rows begin … end of a job. `next` is the place of `end` among the rows of all jobs, which a worker takes
  // in ascending order if it takes no others' rows.
  struct Rows {
    int64_t job, begin, end, next;
  };

  // Calls visit(rows) for what this worker takes, at most max_slice rows at a time.
  template <typename F>
  void for_each(Worker& w, F&& visit) const {
    for (int64_t task = w.take_near(num_tasks_); task < num_tasks_; task = w.take_near(num_tasks_)) {
      const int64_t end = start_of(task + 1);
      for (int64_t unit = start_of(task); unit < end;) {
        const Rows rows = rows_at(unit, end);
        visit(rows);
        unit = rows.next;
      }
    }
  }

  // Where the share begins that worker `index` takes first; it ends where that of the next one begins.
  int64_t share_of(int64_t index) const { return start_of(index * num_tasks_ / num_workers_); }

  // From the place `unit` on the rows of one job, none behind the place `end`.
  Rows rows_at(int64_t unit, int64_t end) const {
    const int64_t job = unit / units_of_job_, first = job * units_of_job_;
    const int64_t next = std::min(end, first + units_of_job_);
    return {job, (unit - first) * slice_multiple, std::min((next - first) * slice_multiple, num_rows_), next};
  }

 private:
  static constexpr int64_t slice_multiple = 4, least_units = 2;

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int64_t start_of(int64_t task) const { return task * units_ / num_tasks_; }

  int64_t num_rows_, units_of_job_, units_, num_workers_, num_tasks_;
};

}  // namespace coldstream
