// AdamW over lists of tensors: CPU loops, and the operation as torch sees it.
#include "adamw/adamw.h"

#include "multi_tensor/list.h"

namespace megatron::adamw {
namespace {

MEGATRON_CLONES void update_all(float* __restrict__ weight, float* __restrict__ exp_avg,
                                float* __restrict__ exp_avg_sq, const float* gradient, int64_t count, float factor,
                                const AdamWStep& step) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) update(weight[i], exp_avg[i], exp_avg_sq[i], gradient[i] * factor, step);
}

// The lists of a call; copies may be empty.
struct Lists {
  at::TensorList weights, gradients, exp_avgs, exp_avg_sqs, steps, copies;
};

void update_chunk(const Lists& lists, const HostChunk& chunk, float factor, const AdamWStep& step) {
  float* weights = mutable_data_of<float>(lists.weights[chunk.tensor]) + chunk.first;
  float* exp_avgs = mutable_data_of<float>(lists.exp_avgs[chunk.tensor]) + chunk.first;
  float* exp_avg_sqs = mutable_data_of<float>(lists.exp_avg_sqs[chunk.tensor]) + chunk.first;
  const at::Tensor& gradients = lists.gradients[chunk.tensor];
  float block[kBlock];
  with_element(gradients, [&](auto element) {
    using G = decltype(element);
    const G* from = data_of<G>(gradients) + chunk.first;
    for (int64_t i = 0; i < chunk.count; i += kBlock) {
      const int64_t count = std::min(kBlock, chunk.count - i);
      if constexpr (std::is_same_v<G, float>) {
        update_all(weights + i, exp_avgs + i, exp_avg_sqs + i, from + i, count, factor, step);
      } else {
        load_scaled(block, from + i, count, factor);
        update_all(weights + i, exp_avgs + i, exp_avg_sqs + i, block, count, 1.0f, step);
      }
      if (lists.copies.empty()) continue;
      with_element(lists.copies[chunk.tensor], [&](auto copy) {
        using C = decltype(copy);
        store_all(mutable_data_of<C>(lists.copies[chunk.tensor]) + chunk.first + i, weights + i, count);
      });
    }
  });
}

void run(const Lists& lists, const AdamW& optimizer, float factor) {
  std::vector<AdamWStep> steps;
  for (const at::Tensor& step : lists.steps) steps.push_back(step_of(optimizer, *data_of<float>(step) + 1.0));
  const std::vector<HostChunk> chunks = host_chunks(lists.weights);
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 2, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) update_chunk(lists, chunks[i], factor, steps[chunks[i].tensor]);
  });
  for (const at::Tensor& step : lists.steps) *mutable_data_of<float>(step) += 1.0f;
}

void check_floats(at::TensorList tensors, const char* name) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "adamw_: ", name, " are ", tensor.scalar_type(),
                "; they must be float32 (weights in half precision are the copies of float32 masters)");
  }
}

void check_scalar(const std::optional<at::Tensor>& scalar, const at::Tensor& like, const char* name) {
  TORCH_CHECK(!scalar.has_value() || (scalar->numel() == 1 && scalar->scalar_type() == at::kFloat &&
                                      scalar->device() == like.device()),
              "adamw_: ", name, " must be one float32 on ", like.device());
}

void check(const Lists& lists) {
  check_list(lists.weights, lists.weights, "adamw_", "weights");
  check_list(lists.weights, lists.gradients, "adamw_", "gradients");
  check_list(lists.weights, lists.exp_avgs, "adamw_", "exp_avgs");
  check_list(lists.weights, lists.exp_avg_sqs, "adamw_", "exp_avg_sqs");
  if (!lists.copies.empty()) check_list(lists.weights, lists.copies, "adamw_", "copies");
  check_floats(lists.weights, "weights");
  check_floats(lists.exp_avgs, "exp_avgs");
  check_floats(lists.exp_avg_sqs, "exp_avg_sqs");
  TORCH_CHECK(lists.steps.size() == lists.weights.size(), "adamw_: ", lists.steps.size(), " steps for ",
              lists.weights.size(), " weights");
  for (const at::Tensor& step : lists.steps) check_scalar(step, lists.weights[0], "each of steps");
}

void adamw(at::TensorList weights, at::TensorList gradients, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
           at::TensorList steps, at::TensorList copies, double learning_rate, double beta1, double beta2,
           double epsilon, double weight_decay, double factor, const std::optional<at::Tensor>& device_rate,
           const std::optional<at::Tensor>& device_factor, const std::optional<at::Tensor>& skip) {
  if (weights.empty()) return;
  const Lists lists{weights, gradients, exp_avgs, exp_avg_sqs, steps, copies};
  check(lists);
  check_scalar(device_rate, weights[0], "device_rate");
  check_scalar(device_factor, weights[0], "device_factor");
  check_scalar(skip, weights[0], "skip");
  AdamW optimizer{learning_rate, beta1, beta2, epsilon, weight_decay};
  const c10::OptionalDeviceGuard guard(weights[0].device());
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(weights[0])) {
    const std::vector<at::Tensor> own_copies = copies.empty() ? std::vector<at::Tensor>(weights.size()) : copies.vec();
    const DeviceTable table = device_table(
        {weights.vec(), gradients.vec(), exp_avgs.vec(), exp_avg_sqs.vec(), steps.vec(), own_copies},
        weights[0].device());
    check_launch(megatron_adamw_step(data_of<int64_t>(table.entries), weights.size(), table.chunks, learning_rate,
                                     beta1, beta2, epsilon, weight_decay, static_cast<float>(factor),
                                     data_of<float>(device_factor), data_of<float>(device_rate), data_of<float>(skip),
                                     stream_of(weights[0])),
                 "adamw_");
    return;
  }
#endif
  if (skip.has_value() && *data_of<float>(skip) != 0.0f) return;
  if (device_rate.has_value()) optimizer.learning_rate = *data_of<float>(device_rate);
  run(lists, optimizer,
      static_cast<float>(factor) * (device_factor.has_value() ? *data_of<float>(device_factor) : 1.0f));
}

}  // namespace
}  // namespace megatron::adamw

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] steps, Tensor(e!)[] copies, float learning_rate, float beta1, float beta2, float epsilon, "
      "float weight_decay, float factor, Tensor? device_rate, Tensor? device_factor, Tensor? skip) -> ()");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) { library.impl("adamw_", &megatron::adamw::adamw); }

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) { library.impl("adamw_", &megatron::adamw::adamw); }
#endif
