// Sums over rows, such as the gradient of a bias: the division of rows into parts with partial sums.
#pragma once

#include "base/portable.h"

namespace megatron {

// Rows per partial sum. Depends only on the number of rows, so sums do not depend on the number of threads or
// on the size of a GPU.
MEGATRON_HOST_DEVICE int64_t rows_per_part(int64_t rows) {
  constexpr int64_t kFewest = 64, kMostParts = 1024;
  return kFewest * ((rows + kFewest * kMostParts - 1) / (kFewest * kMostParts));
}

MEGATRON_HOST_DEVICE int64_t part_count(int64_t rows) {
  return (rows + rows_per_part(rows) - 1) / rows_per_part(rows);
}

}  // namespace megatron
