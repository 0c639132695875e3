// Rotary positions on the CPU, and their registration.
#include "rotary/rotary.h"

#include <memory>

#include "base/host.h"
#include "base/row_sums.h"

namespace megatron::rotary {
namespace {

struct Rotation {
  RotaryPart parts[kMostRotaryParts];
  int part_count;
  RotaryTable table;
  RotarySizes sizes;
  bool interleaved;
  float direction;
};

template <typename T, typename W>
MEGATRON_HOST_DEVICE void rotate_halves(T* to, const T* from, const W* cosines, const W* sines, int64_t pairs) {
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const Pair<W> pair = rotated_pair<W>(load(from + i), load(from + pairs + i), cosines[i], sines[i]);
    store(to + i, pair.first);
    store(to + pairs + i, pair.second);
  }
}

template <typename T, typename W>
MEGATRON_HOST_DEVICE void rotate_neighbours(T* to, const T* from, const W* cosines, const W* sines, int64_t pairs) {
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const Pair<W> pair = rotated_pair<W>(load(from + 2 * i), load(from + 2 * i + 1), cosines[i], sines[i]);
    store(to + 2 * i, pair.first);
    store(to + 2 * i + 1, pair.second);
  }
}

// All heads of one part of one token.
template <typename T, typename W>
MEGATRON_HOST_DEVICE void move_heads(const RotaryPart& part, const Rotation& task, int64_t sample, int64_t token,
                                     const W* cosines, const W* sines) {
  const int64_t pairs = part.is_rotated ? task.sizes.pairs : 0, kept = task.sizes.channels - 2 * pairs;
  for (int64_t index = 0; index < part.heads; ++index) {
    const int64_t group = index / part.heads_per_group, head = index - group * part.heads_per_group;
    const T* from = static_cast<const T*>(part.from) + offset_of(part.from_strides, sample, token, group, head);
    T* to = static_cast<T*>(part.to) + offset_of(part.to_strides, sample, token, group, head);
    if (task.interleaved) {
      rotate_neighbours(to, from, cosines, sines, pairs);
    } else {
      rotate_halves(to, from, cosines, sines, pairs);
    }
    memcpy(static_cast<void*>(to + 2 * pairs), static_cast<const void*>(from + 2 * pairs), kept * sizeof(T));
  }
}

// The tokens from `first` to `last` of all samples; `angles` has room for the cosines and sines of one.
template <typename T, typename C>
MEGATRON_CLONES void rotate_tokens(const Rotation& task, int64_t first, int64_t last, Wide<T>* angles) {
  const int64_t pairs = task.sizes.pairs;
  const Wide<T> direction = task.direction;
  Wide<T>* cosines = angles;
  Wide<T>* sines = angles + pairs;
  for (int64_t index = first; index < last; ++index) {
    const int64_t sample = index / task.sizes.tokens, token = index - sample * task.sizes.tokens;
    const int64_t offset = sample * task.table.sample_stride + token * task.table.token_stride;
    const C* table_cosines = static_cast<const C*>(task.table.cosines) + offset;
    const C* table_sines = static_cast<const C*>(task.table.sines) + offset;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      cosines[i] = static_cast<Wide<T>>(load(table_cosines + i));
      sines[i] = static_cast<Wide<T>>(load(table_sines + i)) * direction;
    }
    for (int part = 0; part < task.part_count; ++part) {
      move_heads<T>(task.parts[part], task, sample, token, cosines, sines);
    }
  }
}

template <typename T, typename C>
void rotate_all(const Rotation& task) {
  int64_t heads = 0;
  for (int part = 0; part < task.part_count; ++part) heads += task.parts[part].heads;
  const int64_t tokens = task.sizes.batch * task.sizes.tokens;
  at::parallel_for(0, tokens, rows_per_task(heads * task.sizes.channels), [&](int64_t first, int64_t last) {
    const std::unique_ptr<Wide<T>[]> angles(new Wide<T>[2 * task.sizes.pairs]);
    rotate_tokens<T, C>(task, first, last, angles.get());
  });
}

void run(const Rotation& task, const at::Tensor& like, const at::Tensor& cosines) {
  if (task.sizes.batch * task.sizes.tokens * task.sizes.channels == 0) return;
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(like)) {
    check_launch(megatron_rotary(task.parts, task.part_count, &task.table, &task.sizes, task.interleaved,
                                 task.direction, dtype_code(like.scalar_type()), dtype_code(cosines.scalar_type()),
                                 stream_of(like)),
                 "rotary");
    return;
  }
#endif
  MEGATRON_ELEMENTS(like.scalar_type(), T, [&] {
    if (cosines.scalar_type() == at::kFloat) {
      rotate_all<T, float>(task);
    } else {
      rotate_all<T, T>(task);
    }
  });
}

at::Tensor with_dense_channels(const at::Tensor& x) {
  return x.size(-1) > 1 && x.stride(-1) != 1 ? x.contiguous() : x;
}

// Cosines and sines `[b or 1, 1, s, pairs]` for tensors like `like`.
struct Angles {
  at::Tensor cosines, sines;
};

Angles checked_angles(const at::Tensor& cosines, const at::Tensor& sines, const at::Tensor& like, int64_t batch,
                      int64_t tokens) {
  TORCH_CHECK(cosines.sizes() == sines.sizes() && cosines.dim() == 4 && cosines.size(1) == 1 &&
                  (cosines.size(0) == 1 || cosines.size(0) == batch) && cosines.size(2) == tokens &&
                  2 * cosines.size(3) <= like.size(-1),
              "cosines and sines must be [b or 1, 1, s, pairs], at most ", like.size(-1) / 2, " pairs, for ", batch,
              " samples of ", tokens, " tokens, not ", cosines.sizes(), " and ", sines.sizes());
  const at::ScalarType dtype = cosines.scalar_type();
  TORCH_CHECK(dtype == sines.scalar_type() && (dtype == at::kFloat || dtype == like.scalar_type()),
              "cosines and sines must both be float32 or ", like.scalar_type(), ", not ", dtype, " and ",
              sines.scalar_type());
  TORCH_CHECK(cosines.device() == like.device() && sines.device() == like.device(), "cosines and sines must be on ",
              like.device(), ", not ", cosines.device(), " and ", sines.device());
  Angles angles{with_dense_channels(cosines), with_dense_channels(sines)};
  if (angles.cosines.strides() != angles.sines.strides()) {
    angles = {cosines.contiguous(), sines.contiguous()};
  }
  return angles;
}

RotaryTable table_of(const Angles& angles) {
  const int64_t sample_stride = angles.cosines.size(0) == 1 ? 0 : angles.cosines.stride(0);
  return {angles.cosines.const_data_ptr(), angles.sines.const_data_ptr(), sample_stride, angles.cosines.stride(2)};
}

// The strides of `[b, a, s, d]`, as one group.
HeadStrides strides_of(const at::Tensor& heads) { return {heads.stride(0), heads.stride(2), 0, heads.stride(1)}; }

RotaryPart part_between(const at::Tensor& from, at::Tensor& to) {
  return {from.const_data_ptr(), to.mutable_data_ptr(), strides_of(from), strides_of(to), from.size(1),
          std::max<int64_t>(1, from.size(1)), 1};
}

void check_same(const at::Tensor& one, const at::Tensor& other, const char* names) {
  TORCH_CHECK(one.dim() == 4 && other.dim() == 4 && one.size(0) == other.size(0) && one.size(2) == other.size(2) &&
                  one.size(3) == other.size(3) && one.scalar_type() == other.scalar_type() &&
                  one.device() == other.device(),
              names, " must be [b, heads, s, d] of one dtype and device, not ", one.sizes(), " ", one.scalar_type(),
              " on ", one.device(), " and ", other.sizes(), " ", other.scalar_type(), " on ", other.device());
}

// Memory for heads `[b, a, s, d]` in token-major layout, like a projection's output: attention writes its output in the
// layout of the queries, and the output projection needs the heads of a token to be contiguous.
at::Tensor empty_heads(int64_t batch, int64_t heads, int64_t tokens, int64_t channels, const at::TensorOptions& options) {
  return at::empty({batch, tokens, heads, channels}, options).transpose(1, 2);
}

// Queries `[b, a, s, d]` and keys `[b, g, s, d]` of any strides, rotated, token by token.
std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& any_query, const at::Tensor& any_key,
                                          const at::Tensor& cosines, const at::Tensor& sines, bool interleaved,
                                          bool opposite) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_query));
  check_same(any_query, any_key, "queries and keys");
  const at::Tensor query = with_dense_channels(any_query), key = with_dense_channels(any_key);
  const int64_t batch = query.size(0), tokens = query.size(2), channels = query.size(3);
  const Angles angles = checked_angles(cosines, sines, query, batch, tokens);
  at::Tensor new_query = empty_heads(batch, query.size(1), tokens, channels, query.options());
  at::Tensor new_key = empty_heads(batch, key.size(1), tokens, channels, key.options());
  const Rotation task{{part_between(query, new_query), part_between(key, new_key)},
                      2,
                      table_of(angles),
                      {batch, tokens, channels, angles.cosines.size(3)},
                      interleaved,
                      opposite ? -1.0f : 1.0f};
  run(task, query, angles.cosines);
  return {new_query, new_key};
}

// The strides of `[b, g * count, s, d]` by groups.
HeadStrides grouped_strides(const at::Tensor& heads, int64_t count) {
  return {heads.stride(0), heads.stride(2), heads.stride(1) * count, heads.stride(1)};
}

// Rotated queries `[b, a, s, d]` and keys, and values `[b, g, s, d]`, of a fused projection, token by
// token.
std::tuple<at::Tensor, at::Tensor, at::Tensor> rotary_split(const at::Tensor& any_qkv, const at::Tensor& cosines,
                                                            const at::Tensor& sines, bool interleaved) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_qkv));
  TORCH_CHECK(any_qkv.dim() == 5 && any_qkv.size(3) >= 3,
              "queries, keys and values must be [b, s, groups, queries of a group + 2, d], not ", any_qkv.sizes());
  const at::Tensor qkv = with_dense_channels(any_qkv);
  const int64_t batch = qkv.size(0), tokens = qkv.size(1), groups = qkv.size(2), queries = qkv.size(3) - 2;
  const int64_t channels = qkv.size(4);
  const Angles angles = checked_angles(cosines, sines, qkv, batch, tokens);
  const HeadStrides whole{qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3)};
  at::Tensor query = empty_heads(batch, groups * queries, tokens, channels, qkv.options());
  at::Tensor key = empty_heads(batch, groups, tokens, channels, qkv.options());
  at::Tensor value = empty_heads(batch, groups, tokens, channels, qkv.options());
  const char* data = static_cast<const char*>(qkv.const_data_ptr());
  const int64_t head_bytes = qkv.stride(3) * qkv.element_size();
  const Rotation task{
      {{data, query.mutable_data_ptr(), whole, grouped_strides(query, queries), groups * queries, queries, 1},
       {data + queries * head_bytes, key.mutable_data_ptr(), whole, grouped_strides(key, 1), groups, 1, 1},
       {data + (queries + 1) * head_bytes, value.mutable_data_ptr(), whole, grouped_strides(value, 1), groups, 1, 0}},
      3,
      table_of(angles),
      {batch, tokens, channels, angles.cosines.size(3)},
      interleaved,
      1.0f};
  run(task, qkv, angles.cosines);
  return {query, key, value};
}

void check_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  check_same(query, key, "gradients of queries and keys");
  check_same(key, value, "gradients of keys and values");
  TORCH_CHECK(key.size(1) == value.size(1) && key.size(1) > 0 && query.size(1) % key.size(1) == 0,
              "the heads of the queries must be a multiple of those of keys and values, not ", query.size(1), ", ",
              key.size(1), " and ", value.size(1));
}

// Writes the three gradients to `qkv`, rotated back by the angles.
void join(const at::Tensor& qkv, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
          const Angles& angles, bool interleaved) {
  const int64_t batch = query.size(0), tokens = query.size(2), channels = query.size(3), groups = key.size(1);
  const int64_t queries = query.size(1) / groups;
  const HeadStrides whole{qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3)};
  char* data = static_cast<char*>(qkv.mutable_data_ptr());
  const int64_t head_bytes = qkv.stride(3) * qkv.element_size();
  const Rotation task{
      {{query.const_data_ptr(), data, grouped_strides(query, queries), whole, groups * queries, queries, 1},
       {key.const_data_ptr(), data + queries * head_bytes, grouped_strides(key, 1), whole, groups, 1, 1},
       {value.const_data_ptr(), data + (queries + 1) * head_bytes, grouped_strides(value, 1), whole, groups, 1, 0}},
      3,
      table_of(angles),
      {batch, tokens, channels, angles.cosines.size(3)},
      interleaved,
      -1.0f};
  run(task, query, angles.cosines);
}

// The gradient of `rotary_split`: the three gradients, of any strides, in one contiguous tensor.
at::Tensor rotary_join(const at::Tensor& any_query, const at::Tensor& any_key, const at::Tensor& any_value,
                       const at::Tensor& cosines, const at::Tensor& sines, bool interleaved) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_query));
  check_heads(any_query, any_key, any_value);
  const at::Tensor query = with_dense_channels(any_query), key = with_dense_channels(any_key),
                   value = with_dense_channels(any_value);
  const int64_t batch = query.size(0), tokens = query.size(2), groups = key.size(1);
  const Angles angles = checked_angles(cosines, sines, query, batch, tokens);
  const int64_t members = query.size(1) / groups + 2;
  const at::Tensor qkv = at::empty({batch, tokens, groups, members, query.size(3)}, query.options());
  join(qkv, query, key, value, angles, interleaved);
  return qkv;
}

// The heads of gradients, checked, and with runs of 16 bytes that begin at 16-byte boundaries where they are on a GPU.
at::Tensor packed_heads(const at::Tensor& heads) {
  const at::Tensor dense = with_dense_channels(heads);
  if (!is_on_gpu(heads)) return dense;
  bool is_packed = reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) is_packed = is_packed && dense.stride(dim) * dense.element_size() % 16 == 0;
  return is_packed ? dense : dense.clone(at::MemoryFormat::Contiguous);
}

template <typename T>
MEGATRON_CLONES void add_rows(Wide<T>* sums, const T* from, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += load(from + row * columns + i);
  }
}

// The sum over tokens of each column of `[b, s, groups, members, d]`, to `sums`.
void sum_tokens(const at::Tensor& sums, const at::Tensor& joined) {
  const int64_t columns = sums.numel(), rows = joined.numel() / std::max<int64_t>(1, columns);
  MEGATRON_ELEMENTS(joined.scalar_type(), T, [&] {
    const T* from = data_of<T>(joined);
    const auto wide = joined.options().dtype(std::is_same_v<T, double> ? at::kDouble : at::kFloat);
    sums.copy_(column_sums<Wide<T>>(rows, columns, wide, [&](int64_t first, int64_t last, Wide<T>* few) {
      add_rows(few, from + first * columns, last - first, columns);
    }));
  });
}

// Gradients of queries, keys and values, of any strides, in one contiguous tensor, and the sums of its columns, which are
// the gradient of a bias, in `sums_dtype`; empty without one.
std::tuple<at::Tensor, at::Tensor> join_heads(const at::Tensor& any_query, const at::Tensor& any_key,
                                              const at::Tensor& any_value,
                                              std::optional<at::ScalarType> sums_dtype) {
  const c10::OptionalDeviceGuard guard(at::device_of(any_query));
  check_heads(any_query, any_key, any_value);
  const at::Tensor query = packed_heads(any_query), key = packed_heads(any_key), value = packed_heads(any_value);
  const int64_t batch = query.size(0), tokens = query.size(2), channels = query.size(3), groups = key.size(1);
  const int64_t queries = query.size(1) / groups, columns = groups * (queries + 2) * channels;
  const at::Tensor qkv = at::empty({batch, tokens, groups, queries + 2, channels}, query.options());
  const auto options = query.options().dtype(sums_dtype.value_or(query.scalar_type()));
  const at::Tensor sums = at::empty({sums_dtype.has_value() ? columns : 0}, options);
  if (qkv.numel() == 0) return {qkv, sums.zero_()};
#if defined(MEGATRON_WITH_CUDA)
  if (is_on_gpu(query)) {
    TORCH_CHECK(channels * query.element_size() % 16 == 0, "join_heads: heads of ", channels, " channels of ",
                query.scalar_type(), " are not multiples of 16 bytes");
    const JoinedHeads heads{{query.const_data_ptr(), key.const_data_ptr(), value.const_data_ptr()},
                            {grouped_strides(query, queries), grouped_strides(key, 1), grouped_strides(value, 1)},
                            batch, tokens, groups, queries, channels};
    const at::Tensor parts =
        at::empty({sums_dtype.has_value() ? part_count(batch * tokens) : 0, columns}, options.dtype(at::kFloat));
    void* to_sums = sums_dtype.has_value() ? sums.mutable_data_ptr() : nullptr;
    check_launch(megatron_join_heads(qkv.mutable_data_ptr(), to_sums, mutable_data_of<float>(parts), &heads,
                                     dtype_code(query.scalar_type()), dtype_code(sums.scalar_type()),
                                     stream_of(query)),
                 "join_heads");
    return {qkv, sums};
  }
#endif
  const at::Tensor angles = at::empty({1, 1, tokens, 0}, query.options().dtype(at::kFloat));
  join(qkv, query, key, value, {angles, angles}, false);
  if (sums_dtype.has_value()) sum_tokens(sums, qkv);
  return {qkv, sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(megatron, library) {
  library.def(
      "rotary(Tensor query, Tensor key, Tensor cosines, Tensor sines, bool interleaved, bool opposite) -> "
      "(Tensor, Tensor)");
  library.def("rotary_split(Tensor qkv, Tensor cosines, Tensor sines, bool interleaved) -> (Tensor, Tensor, Tensor)");
  library.def(
      "rotary_join(Tensor query, Tensor key, Tensor value, Tensor cosines, Tensor sines, bool interleaved) -> Tensor");
  library.def("join_heads(Tensor query, Tensor key, Tensor value, ScalarType? sums_dtype) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(megatron, CPU, library) {
  library.impl("rotary", &rotary);
  library.impl("rotary_split", &rotary_split);
  library.impl("rotary_join", &rotary_join);
  library.impl("join_heads", &join_heads);
}

#if defined(MEGATRON_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron, CUDA, library) {
  library.impl("rotary", &rotary);
  library.impl("rotary_split", &rotary_split);
  library.impl("rotary_join", &rotary_join);
  library.impl("join_heads", &join_heads);
}
#endif

}  // namespace megatron::rotary
