// Sums over rows, such as the gradient of a bias: how rows are divided into parts, each with a partial sum of its own.
#pragma once

#include "base/portable.h"

namespace megatron {

// Rows that share a partial sum. It depends on the number of rows only, so sums do not depend on the number of threads or
// on the size of a GPU.
MEGATRON_HOST_DEVICE int64_t rows_per_part(int64_t rows) {
  constexpr int64_t kFewest = 64, kMostParts = 1024;
  return kFewest * ((rows + kFewest * kMostParts - 1) / (kFewest * kMostParts));
}

MEGATRON_HOST_DEVICE int64_t part_count(int64_t rows) {
  return (rows + rows_per_part(rows) - 1) / rows_per_part(rows);
}

}  // namespace megatron
