// Scaled softmax with dropout on the CPU, and its registration.
#include "softmax/softmax.h"

#include <memory>

#include "base/host.h"

namespace megatron::softmax {
namespace {

constexpr int64_t kPairsAtOnce = 64;  // columns whose random bits are held at a time

// A mask or bias, read by rows.
struct Operand {
  const void* data = nullptr;
  BroadcastStrides strides{0, 0, 0};
};

struct Dropout {
  const int64_t* rows = nullptr;      // [b, a, q], hashed
  const uint32_t* columns = nullptr;  // [(k + 1) / 2], hashed
  int32_t threshold = 0;
};

template <typename T>
struct Forward {
  T* result;
  T* probabilities;  // null without dropout
  const T* scores;
  Operand mask, bias;
  bool bias_is_float;
  Dropout dropout;
  ScoreSizes sizes;
  Wide<T> scale;
  bool causal;
};

template <typename T>
struct Backward {
  T* score_gradient;
  const T* gradient;
  const T* probabilities;
  Dropout dropout;
  ScoreSizes sizes;
  Wide<T> scale;
  bool causal;
};

// A row of scaled scores with its bias.
template <typename T, typename B>
MEGATRON_HOST_DEVICE void biased_row(Wide<T>* result, const T* scores, Wide<T> scale, const B* bias, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) result[j] = load(scores + j) * scale + static_cast<Wide<T>>(load(bias + j));
}

template <typename W>
MEGATRON_HOST_DEVICE void hide_row(W* scores, const uint8_t* mask, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) scores[j] = mask[j] ? -static_cast<W>(INFINITY) : scores[j];
}

// Replaces scores by their exponentials; returns their normalizer.
template <typename W>
MEGATRON_HOST_DEVICE Divisor<W> exponentiate_row(W* scores, int64_t count) {
  W largest = -static_cast<W>(INFINITY), sum = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = scores[j] > largest ? scores[j] : largest;
  const W shift = exponent_shift(largest);
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) {
    scores[j] = exp_of(scores[j] - shift);
    sum += scores[j];
  }
  return divisor_of(sum);
}

// The exponentials of a row of scores, scaled, with bias and mask. The scaled scores are stored before any is subtracted:
// fused with the subtraction, a product would not be rounded like the maximum, which dominates from 1e10 on.
template <typename T>
MEGATRON_HOST_DEVICE Divisor<Wide<T>> exponentiate_scaled_row(Wide<T>* weights, const T* scores, const Forward<T>& task,
                                                              const RowPlace& place, int64_t visible) {
  const Wide<T> scale = task.scale;
  const int64_t offset = offset_of(place, task.bias.strides);
  if (task.bias.data == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < visible; ++j) weights[j] = load(scores + j) * scale;
  } else if (task.bias_is_float) {
    biased_row(weights, scores, scale, static_cast<const float*>(task.bias.data) + offset, visible);
  } else {
    biased_row(weights, scores, scale, static_cast<const T*>(task.bias.data) + offset, visible);
  }
  if (task.mask.data != nullptr) {
    hide_row(weights, static_cast<const uint8_t*>(task.mask.data) + offset_of(place, task.mask.strides), visible);
  }
  return exponentiate_row(weights, visible);
}

// The dropout factors, 0 or the scale, of the entries from `first`, an even column, on.
template <typename W>
MEGATRON_HOST_DEVICE void dropout_factors(W* factors, const Dropout& dropout, uint32_t row, int64_t first,
                                          int64_t count) {
  const W scale = dropout.threshold < kDropoutSteps ? W(65536.0 / (kDropoutSteps - dropout.threshold)) : W(0);
  const uint32_t* columns = dropout.columns + first / 2;
  const int64_t pairs = (count + 1) / 2;
  uint32_t bits[kPairsAtOnce];
  uint16_t halves[2 * kPairsAtOnce];
#pragma omp simd
  for (int64_t pair = 0; pair < pairs; ++pair) bits[pair] = pair_bits(row, columns[pair]);
  memcpy(halves, bits, sizeof(bits));  // the even column has the low half: x86 and ARM are little-endian
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) factors[j] = is_kept(halves[j], dropout.threshold) ? scale : W(0);
}

template <typename T>
MEGATRON_HOST_DEVICE void write_row(T* result, const Wide<T>* weights, Divisor<Wide<T>> divisor, int64_t visible,
                                    int64_t keys) {
#pragma omp simd
  for (int64_t j = 0; j < visible; ++j) store(result + j, quotient(weights[j], divisor));
  memset(static_cast<void*>(result + visible), 0, (keys - visible) * sizeof(T));
}

template <typename T>
MEGATRON_HOST_DEVICE void write_dropped_row(T* result, const Wide<T>* weights, Divisor<Wide<T>> divisor,
                                            const Dropout& dropout, int64_t row, int64_t visible, int64_t keys) {
  Wide<T> factors[2 * kPairsAtOnce];
  const uint32_t row_hash = static_cast<uint32_t>(dropout.rows[row]);
  for (int64_t first = 0; first < visible; first += 2 * kPairsAtOnce) {
    const int64_t count = std::min(2 * kPairsAtOnce, visible - first);
    dropout_factors(factors, dropout, row_hash, first, count);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      store(result + first + j, quotient(weights[first + j], divisor) * factors[j]);
    }
  }
  memset(static_cast<void*>(result + visible), 0, (keys - visible) * sizeof(T));
}

// The rows from `first` to `last`; `weights` has room for one of them.
template <typename T>
MEGATRON_CLONES void forward_rows(const Forward<T>& task, int64_t first, int64_t last, Wide<T>* weights) {
  const int64_t keys = task.sizes.keys;
  for (int64_t row = first; row < last; ++row) {
    const RowPlace place = place_of(row, task.sizes);
    const int64_t visible = visible_keys(place.query, task.sizes, task.causal);
    const T* scores = task.scores + row * keys;
    const Divisor<Wide<T>> divisor = exponentiate_scaled_row(weights, scores, task, place, visible);
    if (task.probabilities == nullptr) {
      write_row(task.result + row * keys, weights, divisor, visible, keys);
    } else {
      write_row(task.probabilities + row * keys, weights, divisor, visible, keys);
      write_dropped_row(task.result + row * keys, weights, divisor, task.dropout, row, visible, keys);
    }
  }
}

// `gradients` has room for one row.
template <typename T>
MEGATRON_CLONES void backward_rows(const Backward<T>& task, int64_t first, int64_t last, Wide<T>* gradients) {
  const int64_t keys = task.sizes.keys;
  const Wide<T> scale = task.scale;
  for (int64_t row = first; row < last; ++row) {
    const int64_t visible = visible_keys(row % task.sizes.queries, task.sizes, task.causal);
    const T* gradient = task.gradient + row * keys;
    const T* probabilities = task.probabilities + row * keys;
    T* result = task.score_gradient + row * keys;
    Wide<T> dot = 0;
    if (task.dropout.rows == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j) gradients[j] = load(gradient + j);
    } else {
      const uint32_t row_hash = static_cast<uint32_t>(task.dropout.rows[row]);
      for (int64_t start = 0; start < visible; start += 2 * kPairsAtOnce) {
        const int64_t count = std::min(2 * kPairsAtOnce, visible - start);
        dropout_factors(gradients + start, task.dropout, row_hash, start, count);
#pragma omp simd
        for (int64_t j = start; j < start + count; ++j) gradients[j] *= load(gradient + j);
      }
    }
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < visible; ++j) dot += gradients[j] * load(probabilities + j);
#pragma omp simd
    for (int64_t j = 0; j < visible; ++j) {
      store(result + j, score_gradient<Wide<T>>(load(probabilities + j), gradients[j], dot, scale));
    }
    memset(static_cast<void*>(result + visible), 0, (keys - visible) * sizeof(T));
  }
}

template <typename T, typename Task>
void on_every_row(const Task& task, void (*rows_of)(const Task&, int64_t, int64_t, Wide<T>*)) {
  const ScoreSizes& sizes = task.sizes;
  const int64_t rows = sizes.batch * sizes.heads * sizes.queries;
  at::parallel_for(0, rows, rows_per_task(sizes.keys), [&](int64_t first, int64_t last) {
    const std::unique_ptr<Wide<T>[]> room(new Wide<T>[sizes.keys]);
    rows_of(task, first, last, room.get());
  });
}

ScoreSizes sizes_of(const at::Tensor& scores) {
  TORCH_CHECK(scores.dim() == 4, "scores must be [b, a, q, k], not ", scores.sizes());
  return {scores.size(0), scores.size(1), scores.size(2), scores.size(3)};
}

// A mask or bias with contiguous keys, expanded to the scores' shape without copies.
at::Tensor broadcast(const std::optional<at::Tensor>& operand, const at::Tensor& scores, const char* name) {
  if (!operand.has_value()) return {};
  TORCH_CHECK(operand->device() == scores.device(), name, " is on ", operand->device(), " and the scores on ",
              scores.device());
  TORCH_CHECK(operand->dim() == 4 && operand->size(3) == scores.size(3), name,
              " must be [b or 1, 1 or a, q or 1, k] for scores ", scores.sizes(), ", not ", operand->sizes());
  const at::Tensor dense = operand->size(3) > 1 && operand->stride(3) != 1 ? operand->contiguous() : *operand;
  return dense.expand(scores.sizes());
}

BroadcastStrides strides_of(const at::Tensor& expanded) {
  if (!expanded.defined()) return {0, 0, 0};
  return {expanded.stride(0), expanded.stride(1), expanded.stride(2)};
}

// The hashes of all pairs of columns; on a GPU, room for them.
at::Tensor column_hashes(const at::Tensor& scores, const std::optional<at::Tensor>& rows, int64_t threshold,
                         int64_t column_base) {
  if (!rows.has_value()) {
    TORCH_CHECK(threshold == 0, "dropout with threshold ", threshold, " needs the hashes of the rows");
    return {};
  }
  TORCH_CHECK(threshold > 0 && threshold <= kDropoutSteps, "the dropout threshold must be within 1 and 65536, not ",
              threshold);
  TORCH_CHECK(rows->scalar_type() == at::kLong && rows->is_contiguous() && rows->device() == scores.device() &&
                  rows->sizes() == scores.sizes().slice(0, 3),
              "the hashes of the rows must be contiguous int64 ", scores.sizes().slice(0, 3), " on ", scores.device(),
              ", not ", rows->scalar_type(), " ", rows->sizes(), " on ", rows->device());
  const int64_t pairs = (scores.size(3) + 1) / 2;
  at::Tensor columns = at::empty({pairs}, scores.options().dtype(at::kInt));
  if (!is_on_gpu(scores)) {
    uint32_t* hashes = mutable_data_of<uint32_t>(columns);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      hashes[pair] = column_hash(pair, static_cast<uint64_t>(column_base));
    }
  }
  return columns;
}

template <typename T>
const T* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? data_of<T>(tensor) : nullptr;
}

Dropout dropout_of(const std::optional<at::Tensor>& rows, const at::Tensor& columns, int64_t threshold) {
  return {data_of<int64_t>(rows), pointer_or_null<uint32_t>(columns), static_cast<int32_t>(threshold)};
}

// Both results; the second, the probabilities before dropout, is empty without it.
std::tuple<at::Tensor, at::Tensor> softmax(const at::Tensor& any_scores, double scale, bool causal,
                                           const std::optional<at::Tensor>& any_mask,
                                           const std::optional<at::Tensor>& any_bias,
                                           const std::optional<at::Tensor>& rows, int64_t threshold,
                                           int64_t column_base) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_scores));
  const at::Tensor scores = any_scores.contiguous();
  const ScoreSizes sizes = sizes_of(scores);
  const at::Tensor mask = broadcast(any_mask, scores, "the mask"), bias = broadcast(any_bias, scores, "the bias");
  TORCH_CHECK(!mask.defined() || mask.scalar_type() == at::kBool,
              "the mask must be bool, true where a key is hidden, not ", mask.scalar_type());
  TORCH_CHECK(!bias.defined() || bias.scalar_type() == at::kFloat || bias.scalar_type() == scores.scalar_type(),
              "the bias must be float32 or ", scores.scalar_type(), " like the scores, not ", bias.scalar_type());
  const at::Tensor columns = column_hashes(scores, rows, threshold, column_base);
  at::Tensor result = at::empty_like(scores);
  at::Tensor probabilities = rows.has_value() ? at::empty_like(scores) : at::empty({0}, scores.options());
  if (scores.numel() == 0) return {result, probabilities};
  const bool bias_is_float = bias.defined() && bias.scalar_type() == at::kFloat;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(scores)) {
    const BroadcastStrides mask_strides = strides_of(mask), bias_strides = strides_of(bias);
    check_launch(
        megatron_softmax_forward(result.mutable_data_ptr(),
                                 rows.has_value() ? probabilities.mutable_data_ptr() : nullptr,
                                 scores.const_data_ptr(), pointer_or_null<uint8_t>(mask), &mask_strides.sample,
                                 pointer_or_null<void>(bias), &bias_strides.sample, data_of<int64_t>(rows),
                                 columns.defined() ? mutable_data_of<uint32_t>(columns) : nullptr, &sizes.batch,
                                 static_cast<float>(scale), causal, dtype_code(scores.scalar_type()),
                                 bias_is_float ? kFloat32 : dtype_code(scores.scalar_type()),
                                 static_cast<int32_t>(threshold), static_cast<uint64_t>(column_base),
                                 stream_of(scores)),
        "softmax");
    return {result, probabilities};
  }
#endif
  MEGATRON_ELEMENTS(scores.scalar_type(), T, [&] {
    const Forward<T> task{mutable_data_of<T>(result),
                          rows.has_value() ? mutable_data_of<T>(probabilities) : nullptr,
                          data_of<T>(scores),
                          {pointer_or_null<void>(mask), strides_of(mask)},
                          {pointer_or_null<void>(bias), strides_of(bias)},
                          bias_is_float,
                          dropout_of(rows, columns, threshold),
                          sizes,
                          static_cast<Wide<T>>(scale),
                          causal};
    on_every_row<T>(task, &forward_rows<T>);
  });
  return {result, probabilities};
}

at::Tensor softmax_backward(const at::Tensor& any_gradient, const at::Tensor& any_probabilities, double scale,
                            bool causal, const std::optional<at::Tensor>& rows, int64_t threshold,
                            int64_t column_base) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_gradient));
  const at::Tensor gradient = any_gradient.contiguous(), probabilities = any_probabilities.contiguous();
  const ScoreSizes sizes = sizes_of(probabilities);
  TORCH_CHECK(gradient.sizes() == probabilities.sizes() && gradient.scalar_type() == probabilities.scalar_type(),
              "the gradient must be ", probabilities.scalar_type(), " ", probabilities.sizes(),
              " like the probabilities, not ", gradient.scalar_type(), " ", gradient.sizes());
  const at::Tensor columns = column_hashes(probabilities, rows, threshold, column_base);
  at::Tensor result = at::empty_like(probabilities);
  if (result.numel() == 0) return result;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(gradient)) {
    check_launch(megatron_softmax_backward(
                     result.mutable_data_ptr(), gradient.const_data_ptr(), probabilities.const_data_ptr(),
                     data_of<int64_t>(rows), columns.defined() ? mutable_data_of<uint32_t>(columns) : nullptr,
                     &sizes.batch, static_cast<float>(scale), causal, dtype_code(gradient.scalar_type()),
                     static_cast<int32_t>(threshold), static_cast<uint64_t>(column_base), stream_of(gradient)),
                 "softmax_backward");
    return result;
  }
#endif
  MEGATRON_ELEMENTS(gradient.scalar_type(), T, [&] {
    const Backward<T> task{mutable_data_of<T>(result),
                           data_of<T>(gradient),
                           data_of<T>(probabilities),
                           dropout_of(rows, columns, threshold),
                           sizes,
                           static_cast<Wide<T>>(scale),
                           causal};
    on_every_row<T>(task, &backward_rows<T>);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "softmax(Tensor scores, float scale, bool causal, Tensor? mask, Tensor? bias, Tensor? rows, int threshold, "
      "int column_base) -> (Tensor, Tensor)");
  library.def(
      "softmax_backward(Tensor gradient, Tensor probabilities, float scale, bool causal, Tensor? rows, "
      "int threshold, int column_base) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("softmax", &softmax);
  library.impl("softmax_backward", &softmax_backward);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("softmax", &softmax);
  library.impl("softmax_backward", &softmax_backward);
}
#endif

}  // namespace megatron::softmax
