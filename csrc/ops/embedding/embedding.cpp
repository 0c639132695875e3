// Lookup of rows of a vocabulary shard, and its deterministic gradient: CPU loops, and the operations as torch sees them.
#include "embedding/embedding.h"

#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <vector>

#include "base/host.h"

#if defined(MEGATRON_WITH_CUDA)
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#endif

namespace megatron::embedding {
namespace {

constexpr int64_t kTile = 512;  // columns summed at once

// The positions of each row's ids, in ascending order: those of row r are positions[starts[r]] to
// positions[starts[r + 1] - 1].
struct Occurrences {
  std::vector<int64_t> starts, positions;
};

Occurrences occurrences(const int64_t* ids, int64_t count, int64_t rows, int64_t first_row) {
  Occurrences found{std::vector<int64_t>(rows + 1, 0), {}};
  const auto is_own = [=](int64_t i) { return ids[i] >= first_row && ids[i] - first_row < rows; };
  for (int64_t i = 0; i < count; ++i) {
    if (is_own(i)) ++found.starts[ids[i] - first_row + 1];
  }
  for (int64_t row = 0; row < rows; ++row) found.starts[row + 1] += found.starts[row];
  found.positions.resize(found.starts[rows]);
  std::vector<int64_t> next(found.starts.begin(), found.starts.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    if (is_own(i)) found.positions[next[ids[i] - first_row]++] = i;
  }
  return found;
}

// A matrix of zeros. Few rows of a large vocabulary are written, and the system returns zeroed memory for large requests:
// the pages of the other rows are never touched.
at::Tensor zeros(int64_t rows, int64_t columns, at::TensorOptions options) {
  constexpr size_t kAlignment = 64;
  const size_t bytes = static_cast<size_t>(rows * columns) * options.dtype().itemsize();
  void* memory = std::calloc(bytes + kAlignment, 1);
  TORCH_CHECK(memory != nullptr, "embedding_backward: no memory for a gradient of ", bytes, " bytes");
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + kAlignment) & ~(kAlignment - 1));
  return at::from_blob(aligned, {rows, columns}, [memory](void*) { std::free(memory); }, options);
}

// The sum of some rows of the gradient, from the first to the last, in wide arithmetic.
template <typename T>
MEGATRON_CLONES void sum_rows(T* to, const T* gradient, const int64_t* positions, int64_t count, int64_t columns) {
  Wide<T> sums[kTile];
  for (int64_t first = 0; first < columns; first += kTile) {
    const int64_t width = std::min(kTile, columns - first);
    for (int64_t column = 0; column < width; ++column) sums[column] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const T* from = gradient + positions[i] * columns + first;
#pragma omp simd
      for (int64_t column = 0; column < width; ++column) sums[column] += load(from + column);
    }
#pragma omp simd
    for (int64_t column = 0; column < width; ++column) store(to + first + column, sums[column]);
  }
}

// Splits the rows into parts of about equal work, since a few ids make up most of a text.
std::vector<int64_t> equal_parts(const Occurrences& found, int64_t columns) {
  const int64_t rows = static_cast<int64_t>(found.starts.size()) - 1, work = rows + found.starts[rows];
  const int64_t parts = std::max<int64_t>(1, std::min(work, work * columns / kElementsPerTask));
  std::vector<int64_t> bounds{0};
  for (int64_t part = 1; part < parts; ++part) {
    int64_t low = bounds.back(), high = rows;  // the first row behind the part's share of the work
    const int64_t share = work / parts * part;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (middle + found.starts[middle] < share) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    bounds.push_back(low);
  }
  bounds.push_back(rows);
  return bounds;
}

template <typename T>
void run_backward(const at::Tensor& result, const at::Tensor& gradient, const at::Tensor& ids, int64_t first_row) {
  const int64_t rows = result.size(0), columns = result.size(1);
  const Occurrences found = occurrences(data_of<int64_t>(ids), ids.numel(), rows, first_row);
  const std::vector<int64_t> bounds = equal_parts(found, columns);
  const T* from = data_of<T>(gradient);
  T* to = mutable_data_of<T>(result);
  at::parallel_for(0, static_cast<int64_t>(bounds.size()) - 1, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = bounds[first]; row < bounds[last]; ++row) {
      const int64_t start = found.starts[row], count = found.starts[row + 1] - start;
      if (count > 0) sum_rows(to + row * columns, from, found.positions.data() + start, count, columns);
    }
  });
}

void run_forward(const at::Tensor& result, const at::Tensor& weight, const at::Tensor& ids, int64_t first_row) {
  const int64_t rows = weight.size(0), bytes = weight.size(1) * weight.element_size();
  const int64_t* from_ids = data_of<int64_t>(ids);
  const char* from = static_cast<const char*>(weight.const_data_ptr());
  char* to = static_cast<char*>(result.mutable_data_ptr());
  at::parallel_for(0, ids.numel(), rows_per_task(weight.size(1)), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = from_ids[i] - first_row;
      if (row >= 0 && row < rows) {
        memcpy(to + i * bytes, from + row * bytes, bytes);
      } else {
        memset(to + i * bytes, 0, bytes);
      }
    }
  });
}

at::Tensor forward(const at::Tensor& weight, const at::Tensor& ids, int64_t first_row) {
  TORCH_CHECK(weight.dim() == 2, "embedding: the weight is ", weight.sizes(), "; it must have two dimensions");
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.device() == weight.device(), "embedding: ids are ",
              ids.scalar_type(), " on ", ids.device(), "; they must be int64 on ", weight.device());
  const c10::OptionalDeviceGuard guard(weight.device());
  const at::Tensor table = weight.contiguous(), own_ids = ids.contiguous();
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  const at::Tensor result = at::empty(shape, weight.options());
  if (result.numel() == 0) return result;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(weight)) {
    check_launch(megatron_embedding_forward(result.mutable_data_ptr(), table.const_data_ptr(),
                                            data_of<int64_t>(own_ids), ids.numel(), weight.size(0), weight.size(1),
                                            first_row, dtype_code(weight.scalar_type()), stream_of(weight)),
                 "embedding");
    return result;
  }
#endif
  run_forward(result, table, own_ids, first_row);
  return result;
}

at::Tensor backward(const at::Tensor& gradient, const at::Tensor& ids, int64_t rows, int64_t first_row) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && gradient.dim() == ids.dim() + 1 &&
                  gradient.sizes().slice(0, ids.dim()) == ids.sizes(),
              "embedding_backward: the gradient is ", gradient.sizes(), " for ids of ", ids.scalar_type(), ids.sizes(),
              "; it must have one row for each int64 id");
  TORCH_CHECK(rows >= 0, "embedding_backward: rows is ", rows, "; a table cannot have fewer than none");
  const c10::OptionalDeviceGuard guard(gradient.device());
  const at::Tensor from = gradient.contiguous(), own_ids = ids.contiguous();
  const int64_t columns = gradient.size(-1);
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(gradient)) {
    const at::Tensor result = at::zeros({rows, columns}, gradient.options());
    if (result.numel() == 0 || ids.numel() == 0) return result;
    // A plain `true` would select another overload, as dimension 1.
    const auto [sorted, positions] = at::sort(own_ids.view({-1}), std::optional<bool>(true), /*dim=*/0, /*descending=*/false);
    const int64_t chunks = (ids.numel() + kChunkPositions - 1) / kChunkPositions;
    const at::Tensor sums = at::empty({chunks, 2, columns}, gradient.options().dtype(at::kFloat));
    check_launch(megatron_embedding_backward(result.mutable_data_ptr(), from.const_data_ptr(),
                                             data_of<int64_t>(sorted), data_of<int64_t>(positions),
                                             mutable_data_of<float>(sums), ids.numel(), rows, columns, first_row,
                                             dtype_code(gradient.scalar_type()), stream_of(gradient)),
                 "embedding_backward");
    return result;
  }
#endif
  if (rows * columns == 0) return at::empty({rows, columns}, gradient.options());
  const at::Tensor result = zeros(rows, columns, gradient.options());
  MEGATRON_ELEMENTS(gradient.scalar_type(), T, [&] { run_backward<T>(result, from, own_ids, first_row); });
  return result;
}

}  // namespace
}  // namespace megatron::embedding

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("embedding(Tensor weight, Tensor ids, int first_row) -> Tensor");
  library.def("embedding_backward(Tensor gradient, Tensor ids, int rows, int first_row) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("embedding", &megatron::embedding::forward);
  library.impl("embedding_backward", &megatron::embedding::backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("embedding", &megatron::embedding::forward);
  library.impl("embedding_backward", &megatron::embedding::backward);
}
#endif
