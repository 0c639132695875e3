// Sums over rows in CPU loops; only `.cpp` files include it.
#pragma once

#include <algorithm>
#include <vector>

#include "base/column_sums.h"
#include "base/host.h"

namespace megatron {

// Calls `run(first, last, sums)` for rows of `[rows, columns]`, in parallel; it adds its rows to `sums`, `[columns]`.
// Returns the sums over all rows. Short runs of rows are summed first and then combined, which
// keeps the sums accurate; the runs are fixed, which makes them independent of the number of threads.
template <typename Real, typename Run>
at::Tensor column_sums(int64_t rows, int64_t columns, const at::TensorOptions& options, const Run& run) {
  constexpr int64_t kRowsPerSum = 16;  // divides rows_per_part
  const int64_t rows_each = rows_per_part(rows), parts = part_count(rows);
  const at::Tensor sums = at::empty({parts, columns}, options).zero_();
  Real* part_sums = mutable_data_of<Real>(sums);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    std::vector<Real> few(columns);
    for (int64_t row = first * rows_each; row < std::min(last * rows_each, rows); row += kRowsPerSum) {
      std::fill(few.begin(), few.end(), Real(0));
      run(row, std::min(row + kRowsPerSum, rows), few.data());
      Real* part = part_sums + row / rows_each * columns;
      for (int64_t i = 0; i < columns; ++i) part[i] += few[i];
    }
  });
  return sums.sum(0);
}

}  // namespace megatron
