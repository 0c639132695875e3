// Cross-entropy over a slice of the vocabulary: CPU loops, and the operations as torch sees them.
#include "cross_entropy/cross_entropy.h"

#include <ATen/ops/stack.h>

#include <limits>

#include "base/host.h"

namespace megatron::cross_entropy {
namespace {

constexpr int64_t kBlock = 256;  // columns whose logits are held, and summed, in the precision of the arithmetic

// The statistics of a row, each `stride` apart: a block of columns at a time, so that it is read from memory once.
// Blocks are summed in float64, whose rounding does not grow with the vocabulary.
template <typename T>
MEGATRON_CLONES void row_statistics(Wide<T>* result, int64_t stride, const T* row, int64_t label, int64_t valid,
                                    Wide<T> cap) {
  Wide<T> values[kBlock], largest = std::numeric_limits<Wide<T>>::lowest();
  double total = 0, whole = 0;
  for (int64_t first = 0; first < valid; first += kBlock) {
    const int64_t count = std::min(kBlock, valid - first);
    Wide<T> highest = largest, sum = 0, exponentials = 0;
    if (cap > 0) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) values[i] = capped(load(row + first + i), cap);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) values[i] = load(row + first + i);
    }
#pragma omp simd reduction(max : highest) reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
      highest = values[i] > highest ? values[i] : highest;
      sum += values[i];
    }
#pragma omp simd reduction(+ : exponentials)
    for (int64_t i = 0; i < count; ++i) exponentials += exp_of(values[i] - highest);
    total = total * static_cast<double>(exp_of(largest - highest)) + exponentials;
    whole += sum;
    largest = highest;
  }
  result[0] = largest;
  result[stride] = static_cast<Wide<T>>(total);
  result[2 * stride] = label >= 0 && label < valid ? capped<Wide<T>>(load(row + label), cap) : 0;
  result[3 * stride] = static_cast<Wide<T>>(whole);
}

// The gradients of a row, which may be written over its logits.
template <typename T>
MEGATRON_CLONES void row_gradient(T* to, const T* from, int64_t label, int64_t valid, int64_t columns,
                                  const RowTerms<Wide<T>>& terms) {
  const bool has_label = label >= 0 && label < valid;
  const Wide<T> at_label = has_label ? logit_gradient<Wide<T>>(load(from + label), true, terms) : 0;
  const RowTerms<Wide<T>> of = terms;
  if (of.cap > 0) {
#pragma omp simd
    for (int64_t i = 0; i < valid; ++i) store(to + i, logit_gradient<Wide<T>>(load(from + i), false, of));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < valid; ++i) {
      store(to + i, exp_of(load(from + i) - of.normalizer) * of.weight - of.uniform);
    }
  }
  for (int64_t i = valid; i < columns; ++i) store(to + i, Wide<T>(0));
  if (has_label) store(to + label, at_label);
}

at::ScalarType wide_of(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

void check_rows(const at::Tensor& logits, const at::Tensor& labels, int64_t valid) {
  TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits have ", logits.dim(), " dimensions; they need rows and columns");
  TORCH_CHECK(labels.dim() == 1 && labels.scalar_type() == at::kLong && labels.size(0) == logits.size(0),
              "cross_entropy: labels are ", labels.scalar_type(), labels.sizes(), "; they must be int64 with one entry for "
              "each of the ", logits.size(0), " rows");
  TORCH_CHECK(valid >= 0 && valid <= logits.size(1), "cross_entropy: ", valid, " valid columns of ", logits.size(1),
              "; there cannot be more than there are columns");
}

// Rows with any stride, each contiguous.
at::Tensor with_whole_rows(const at::Tensor& logits) {
  return logits.stride(1) == 1 || logits.size(1) < 2 ? logits : logits.contiguous();
}

at::Tensor statistics(const at::Tensor& logits, const at::Tensor& labels, int64_t valid, double softcap) {
  check_rows(logits, labels, valid);
  const c10::OptionalDeviceGuard guard(logits.device());
  const int64_t rows = logits.size(0);
  const at::Tensor from = with_whole_rows(logits), own = labels.contiguous();
  const at::Tensor result = at::empty({4, rows}, logits.options().dtype(wide_of(logits.scalar_type())));
  if (rows == 0) return result;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(logits)) {
    check_launch(megatron_logit_statistics(mutable_data_of<float>(result), from.const_data_ptr(),
                                           data_of<int64_t>(own), rows, from.stride(0), valid,
                                           dtype_code(from.scalar_type()), static_cast<float>(softcap),
                                           stream_of(from)),
                 "logit_statistics");
    return result;
  }
#endif
  MEGATRON_ELEMENTS(logits.scalar_type(), T, [&] {
    Wide<T>* to = mutable_data_of<Wide<T>>(result);
    const T* data = data_of<T>(from);
    const int64_t* label = data_of<int64_t>(own);
    const int64_t stride = from.stride(0);
    at::parallel_for(0, rows, rows_per_task(valid), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        row_statistics<T>(to + row, rows, data + row * stride, label[row], valid, static_cast<Wide<T>>(softcap));
      }
    });
  });
  return result;
}

// The optional derivative by a loss, in the precision of the arithmetic.
at::Tensor derivative(const std::optional<at::Tensor>& by, const at::Tensor& logits, const char* name) {
  if (!by.has_value()) return at::Tensor();
  TORCH_CHECK(by->dim() == 1 && by->size(0) == logits.size(0), "cross_entropy: ", name, " has the shape ", by->sizes(),
              "; it needs one entry for each of the ", logits.size(0), " rows");
  return by->to(wide_of(logits.scalar_type())).contiguous();
}

template <typename W>
const W* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? data_of<W>(tensor) : nullptr;
}

struct Derivatives {
  at::Tensor normalizer, of_label, of_normalizer, of_uniform;
  int64_t vocab_size;
  double softcap;

  template <typename W>
  LossTerms<W> terms() const {
    return {data_or_null<W>(normalizer), data_or_null<W>(of_label), data_or_null<W>(of_normalizer),
            data_or_null<W>(of_uniform), static_cast<W>(vocab_size), static_cast<W>(softcap)};
  }
};

void write_gradient(const at::Tensor& result, const at::Tensor& from, const at::Tensor& labels, int64_t valid,
                    const Derivatives& of) {
  const int64_t rows = from.size(0), columns = from.size(1);
  if (rows == 0 || columns == 0) return;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(from)) {
    const LossTerms<float> terms = of.terms<float>();
    check_launch(megatron_logit_gradient(result.mutable_data_ptr(), from.const_data_ptr(), data_of<int64_t>(labels),
                                         terms.normalizer, terms.of_label, terms.of_normalizer, terms.of_uniform,
                                         rows, columns, result.stride(0), from.stride(0), valid, of.vocab_size,
                                         dtype_code(from.scalar_type()), terms.cap, stream_of(from)),
                 "logit_gradient");
    return;
  }
#endif
  MEGATRON_ELEMENTS(from.scalar_type(), T, [&] {
    T* to = mutable_data_of<T>(result);
    const T* data = data_of<T>(from);
    const int64_t* label = data_of<int64_t>(labels);
    const int64_t to_stride = result.stride(0), stride = from.stride(0);
    const LossTerms<Wide<T>> terms = of.terms<Wide<T>>();
    at::parallel_for(0, rows, rows_per_task(columns), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        row_gradient<T>(to + row * to_stride, data + row * stride, label[row], valid, columns, terms.of_row(row));
      }
    });
  });
}

Derivatives derivatives(const at::Tensor& logits, const at::Tensor& normalizer,
                        const std::optional<at::Tensor>& of_label, const std::optional<at::Tensor>& of_normalizer,
                        const std::optional<at::Tensor>& of_uniform, int64_t vocab_size, double softcap) {
  return {derivative(normalizer, logits, "normalizer"), derivative(of_label, logits, "of_label"),
          derivative(of_normalizer, logits, "of_normalizer"), derivative(of_uniform, logits, "of_uniform"),
          vocab_size, softcap};
}

at::Tensor gradient(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& normalizer,
                    const std::optional<at::Tensor>& of_label, const std::optional<at::Tensor>& of_normalizer,
                    const std::optional<at::Tensor>& of_uniform, int64_t valid, int64_t vocab_size, double softcap) {
  check_rows(logits, labels, valid);
  const c10::OptionalDeviceGuard guard(logits.device());
  const at::Tensor result = at::empty(logits.sizes(), logits.options());
  write_gradient(result, with_whole_rows(logits), labels.contiguous(), valid,
                 derivatives(logits, normalizer, of_label, of_normalizer, of_uniform, vocab_size, softcap));
  return result;
}

void gradient_(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& normalizer,
               const std::optional<at::Tensor>& of_label, const std::optional<at::Tensor>& of_normalizer,
               const std::optional<at::Tensor>& of_uniform, int64_t valid, int64_t vocab_size, double softcap) {
  check_rows(logits, labels, valid);
  TORCH_CHECK(logits.stride(1) == 1 || logits.size(1) < 2, "cross_entropy: the columns of logits are ",
              logits.stride(1), " entries apart; to be written over, each row must be contiguous");
  const c10::OptionalDeviceGuard guard(logits.device());
  write_gradient(logits, logits, labels.contiguous(), valid,
                 derivatives(logits, normalizer, of_label, of_normalizer, of_uniform, vocab_size, softcap));
}

#if defined(MEGATRON_WITH_CUDA)
// True if a block of threads can hold a row: in half precision, in packets at 16-byte boundaries.
bool is_held(const at::Tensor& logits, int64_t valid) {
  return is_on_gpu(logits) && logits.element_size() == 2 && valid > 0 && logits.size(1) <= kMostHeldColumns &&
         logits.size(1) % 8 == 0 && logits.stride(0) % 8 == 0 && logits.stride(1) == 1 &&
         reinterpret_cast<uintptr_t>(logits.const_data_ptr()) % 16 == 0;
}
#endif

// Cross-entropy and log normalizer of every row, `[2, n]`; over the logits the gradient of the sum of weight *
// cross-entropy. On a GPU rows that fit are read once.
at::Tensor losses_(at::Tensor& logits, const at::Tensor& labels, const at::Tensor& weights, int64_t valid) {
  check_rows(logits, labels, valid);
  const c10::OptionalDeviceGuard guard(logits.device());
#if defined(MEGATRON_WITH_CUDA)
  const int64_t rows = logits.size(0);
  if (is_held(logits, valid)) {
    const at::Tensor losses = at::empty({2, rows}, logits.options().dtype(at::kFloat));
    if (rows == 0) return losses;
    const at::Tensor own = labels.contiguous(), of_label = derivative(weights, logits, "weights");
    check_launch(megatron_logit_losses(mutable_data_of<float>(losses), logits.mutable_data_ptr(), data_of<int64_t>(own),
                                       data_of<float>(of_label), rows, logits.size(1), logits.stride(0), valid,
                                       dtype_code(logits.scalar_type()), stream_of(logits)),
                 "logit_losses");
    return losses;
  }
#endif
  const at::Tensor of_rows = statistics(logits, labels, valid, 0.0);
  const at::Tensor normalizer = of_rows[1].log().add_(of_rows[0]);
  gradient_(logits, labels, normalizer, weights, std::nullopt, std::nullopt, valid, valid, 0.0);
  return at::stack({normalizer.sub(of_rows[2]), normalizer});
}

}  // namespace
}  // namespace megatron::cross_entropy

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def("logit_statistics(Tensor logits, Tensor labels, int valid, float softcap) -> Tensor");
  library.def(
      "logit_gradient(Tensor logits, Tensor labels, Tensor normalizer, Tensor? of_label, Tensor? of_normalizer, "
      "Tensor? of_uniform, int valid, int vocab_size, float softcap) -> Tensor");
  library.def(
      "logit_gradient_(Tensor(a!) logits, Tensor labels, Tensor normalizer, Tensor? of_label, Tensor? of_normalizer, "
      "Tensor? of_uniform, int valid, int vocab_size, float softcap) -> ()");
  library.def("logit_losses_(Tensor(a!) logits, Tensor labels, Tensor weights, int valid) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("logit_statistics", &megatron::cross_entropy::statistics);
  library.impl("logit_gradient", &megatron::cross_entropy::gradient);
  library.impl("logit_gradient_", &megatron::cross_entropy::gradient_);
  library.impl("logit_losses_", &megatron::cross_entropy::losses_);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("logit_statistics", &megatron::cross_entropy::statistics);
  library.impl("logit_gradient", &megatron::cross_entropy::gradient);
  library.impl("logit_gradient_", &megatron::cross_entropy::gradient_);
  library.impl("logit_losses_", &megatron::cross_entropy::losses_);
}
#endif
