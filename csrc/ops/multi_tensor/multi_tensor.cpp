// Norms, scaling and a finite check of lists of tensors: CPU loops, and the operations as torch sees them.
#include "multi_tensor/multi_tensor.h"

#include <ATen/ops/zeros.h>

#include <atomic>
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

// Short sums in float32, those in float64; all in float64 where squares may leave the range of float32.
template <typename T>
double squares_of(const T* from, int64_t count) {
  constexpr double kLeast = 1e-20, kMost = 1e38;  // of the sum of a chunk
  const int64_t blocks = count / (kLanes * kTurns), done = blocks * kLanes * kTurns;
  const double total = short_squares_of(from, blocks);
  const bool is_within = total > kLeast && total < kMost;
  return is_within ? total + wide_squares_of(from + done, count - done) : wide_squares_of(from, count);
}

template <typename T>
MEGATRON_CLONES bool is_chunk_finite(const T* from, int64_t count) {
  uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t i = 0; i < count; ++i) wrong |= is_finite(load(from + i)) ? 0u : 1u;
  return wrong == 0;
}

void scale_chunk(const at::Tensor& to, const at::Tensor& from, const HostChunk& chunk, float factor) {
  with_element(to, [&](auto to_element) {
    using D = decltype(to_element);
    with_element(from, [&](auto from_element) {
      using S = decltype(from_element);
      const S* source = data_of<S>(from) + chunk.first;
      D* destination = mutable_data_of<D>(to) + chunk.first;
      if constexpr (std::is_same_v<D, float>) {
        load_scaled(destination, source, chunk.count, factor);
      } else {
        float block[kBlock];
        for (int64_t i = 0; i < chunk.count; i += kBlock) {
          const int64_t count = std::min(kBlock, chunk.count - i);
          load_scaled(block, source + i, count, factor);
          store_all(destination + i, block, count);
        }
      }
    });
  });
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

void scale(at::TensorList destinations, at::TensorList sources, double factor,
           const std::optional<at::Tensor>& device_factor) {
  check_list(destinations, sources, "multi_tensor_scale_", "sources");
  check_list(sources, destinations, "multi_tensor_scale_", "destinations");
  if (destinations.empty()) return;
  TORCH_CHECK(!device_factor.has_value() ||
                  (device_factor->numel() == 1 && device_factor->scalar_type() == at::kFloat &&
                   device_factor->device() == destinations[0].device()),
              "multi_tensor_scale_: device_factor must be one float32 on ", destinations[0].device());
  const c10::OptionalDeviceGuard guard(destinations[0].device());
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(destinations[0])) {
    const DeviceTable table = device_table({destinations.vec(), sources.vec()}, destinations[0].device());
    if (table.chunks == 0) return;
    check_launch(megatron_multi_tensor_scale(data_of<int64_t>(table.entries), destinations.size(), table.chunks,
                                             static_cast<float>(factor), data_of<float>(device_factor),
                                             stream_of(destinations[0])),
                 "multi_tensor_scale_");
    return;
  }
#endif
  const float whole = static_cast<float>(factor) * (device_factor.has_value() ? *data_of<float>(device_factor) : 1.0f);
  const std::vector<HostChunk> chunks = host_chunks(destinations);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 2, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      scale_chunk(destinations[chunks[i].tensor], sources[chunks[i].tensor], chunks[i], whole);
    }
  });
}

at::Tensor not_finite(at::TensorList tensors) {
  check_list(tensors, tensors, "multi_tensor_not_finite", "tensors");
  const c10::OptionalDeviceGuard guard(tensors[0].device());
  const at::Tensor flag = at::zeros({}, results_on(tensors[0]));
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(tensors[0])) {
    const DeviceTable table = device_table({tensors.vec()}, tensors[0].device());
    if (table.chunks == 0) return flag;
    check_launch(megatron_multi_tensor_not_finite(mutable_data_of<float>(flag), data_of<int64_t>(table.entries),
                                                  tensors.size(), table.chunks, stream_of(tensors[0])),
                 "multi_tensor_not_finite");
    return flag;
  }
#endif
  const std::vector<HostChunk> chunks = host_chunks(tensors);
  std::atomic<bool> all{true};
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 2, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last && all; ++i) {
      const at::Tensor& tensor = tensors[chunks[i].tensor];
      const bool is_finite = with_element(tensor, [&](auto element) {
        using T = decltype(element);
        return is_chunk_finite(data_of<T>(tensor) + chunks[i].first, chunks[i].count);
      });
      if (!is_finite) all = false;
    }
  });
  if (!all) *mutable_data_of<float>(flag) = 1.0f;
  return flag;
}

}  // namespace
}  // namespace megatron::multi_tensor

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("multi_tensor_norm(Tensor[] tensors, bool per_tensor) -> (Tensor, Tensor)");
  library.def(
      "multi_tensor_scale_(Tensor(a!)[] destinations, Tensor[] sources, float factor, Tensor? device_factor) -> ()");
  library.def("multi_tensor_not_finite(Tensor[] tensors) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("multi_tensor_norm", &megatron::multi_tensor::norm);
  library.impl("multi_tensor_scale_", &megatron::multi_tensor::scale);
  library.impl("multi_tensor_not_finite", &megatron::multi_tensor::not_finite);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("multi_tensor_norm", &megatron::multi_tensor::norm);
  library.impl("multi_tensor_scale_", &megatron::multi_tensor::scale);
  library.impl("multi_tensor_not_finite", &megatron::multi_tensor::not_finite);
}
#endif
