// Norms and sums of lists of tensors: CPU loops, and the operations as torch sees them.
#include "multi_tensor/multi_tensor.h"

#include <cmath>
#include <tuple>

#include "multi_tensor/list.h"

namespace megatron::multi_tensor {
namespace {

constexpr int kLanes = 32;  // a fixed number, so that the result is the same with every instruction set
constexpr int kTurns = 16;  // squares that a lane adds up in float32

// Adds the lanes in pairs.
template <typename Number>
MEGATRON_HOST_DEVICE double sum_of(Number (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename T>
MEGATRON_CLONES double wide_squares_of(const T* from, int64_t count) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = load(from + i + lane);
      sums[lane] += value * value;
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = load(from + i);
    sums[lane] += value * value;
  }
  return sum_of(sums);
}

template <typename T>
MEGATRON_CLONES double short_squares_of(const T* from, int64_t blocks) {
  double total = 0.0;
  for (int64_t block = 0; block < blocks; ++block) {
    float sums[kLanes] = {};
    for (int turn = 0; turn < kTurns; ++turn, from += kLanes) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = load(from + lane);
        sums[lane] += value * value;
      }
    }
    total += sum_of(sums);
  }
  return total;
}

// Short sums in float32, their totals in float64; all in float64 if squares may exceed the range of float32.
template <typename T>
double squares_of(const T* from, int64_t count) {
  constexpr double kLeast = 1e-20, kMost = 1e38;  // of the sum of a chunk
  const int64_t blocks = count / (kLanes * kTurns), done = blocks * kLanes * kTurns;
  const double total = short_squares_of(from, blocks);
  const bool is_within = total > kLeast && total < kMost;
  return is_within ? total + wide_squares_of(from + done, count - done) : wide_squares_of(from, count);
}

template <typename T>
MEGATRON_CLONES void add_chunk(float* to, const T* from, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += load(from + i);
}

// Sums chunk by chunk in a fixed order, so that the result does not depend on the number of threads.
std::vector<double> sums_of_squares(at::TensorList tensors) {
  const std::vector<HostChunk> chunks = host_chunks(tensors);
  std::vector<double> partial(chunks.size()), sums(tensors.size(), 0.0);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 2, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const at::Tensor& tensor = tensors[chunks[i].tensor];
      partial[i] = with_element(tensor, [&](auto element) {
        using T = decltype(element);
        return squares_of(data_of<T>(tensor) + chunks[i].first, chunks[i].count);
      });
    }
  });
  for (size_t i = 0; i < chunks.size(); ++i) sums[chunks[i].tensor] += partial[i];
  return sums;
}

at::TensorOptions results_on(const at::Tensor& like) {
  return at::TensorOptions().dtype(at::kFloat).device(like.device());
}

std::tuple<at::Tensor, at::Tensor> norm(at::TensorList tensors, bool per_tensor) {
  check_list(tensors, tensors, "multi_tensor_norm", "tensors");
  const c10::OptionalDeviceGuard guard(tensors[0].device());
  const at::Tensor whole = at::empty({}, results_on(tensors[0]));
  const at::Tensor each = at::empty({per_tensor ? static_cast<int64_t>(tensors.size()) : 0}, results_on(tensors[0]));
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(tensors[0])) {
    const DeviceTable table = device_table({tensors.vec()}, tensors[0].device());
    const at::Tensor sums = at::empty({table.chunks}, results_on(tensors[0]).dtype(at::kDouble));
    check_launch(megatron_multi_tensor_norm(mutable_data_of<float>(whole),
                                            per_tensor ? mutable_data_of<float>(each) : nullptr,
                                            mutable_data_of<double>(sums), data_of<int64_t>(table.entries),
                                            tensors.size(), table.chunks, stream_of(tensors[0])),
                 "multi_tensor_norm");
    return {whole, each};
  }
#endif
  double total = 0.0;
  const std::vector<double> sums = sums_of_squares(tensors);
  for (size_t i = 0; i < sums.size(); ++i) {
    total += sums[i];
    if (per_tensor) mutable_data_of<float>(each)[i] = static_cast<float>(std::sqrt(sums[i]));
  }
  *mutable_data_of<float>(whole) = static_cast<float>(std::sqrt(total));
  return {whole, each};
}

void add(at::TensorList totals, at::TensorList addends) {
  check_list(totals, addends, "multi_tensor_add_", "addends");
  check_list(addends, totals, "multi_tensor_add_", "totals");
  for (const at::Tensor& total : totals) {
    TORCH_CHECK(total.scalar_type() == at::kFloat, "multi_tensor_add_: totals are float32, not ", total.scalar_type());
  }
  if (totals.empty()) return;
  const c10::OptionalDeviceGuard guard(totals[0].device());
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(totals[0])) {
    const DeviceTable table = device_table({totals.vec(), addends.vec()}, totals[0].device());
    if (table.chunks == 0) return;
    check_launch(megatron_multi_tensor_add(data_of<int64_t>(table.entries), totals.size(), table.chunks,
                                           stream_of(totals[0])),
                 "multi_tensor_add_");
    return;
  }
#endif
  const std::vector<HostChunk> chunks = host_chunks(totals);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 2, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const HostChunk& chunk = chunks[i];
      const at::Tensor &total = totals[chunk.tensor], &addend = addends[chunk.tensor];
      with_element(addend, [&](auto element) {
        using T = decltype(element);
        add_chunk(mutable_data_of<float>(total) + chunk.first, data_of<T>(addend) + chunk.first, chunk.count);
      });
    }
  });
}

}  // namespace
}  // namespace megatron::multi_tensor

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("multi_tensor_norm(Tensor[] tensors, bool per_tensor) -> (Tensor, Tensor)");
  library.def("multi_tensor_add_(Tensor(a!)[] totals, Tensor[] addends) -> ()");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("multi_tensor_norm", &megatron::multi_tensor::norm);
  library.impl("multi_tensor_add_", &megatron::multi_tensor::add);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("multi_tensor_norm", &megatron::multi_tensor::norm);
  library.impl("multi_tensor_add_", &megatron::multi_tensor::add);
}
#endif
