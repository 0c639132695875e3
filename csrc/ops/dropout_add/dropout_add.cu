// residual + multiplier * dropout(x + bias) on a GPU, in tiles.
//
// A 32-bit hash decides two adjacent columns. Its column part is the most expensive and is computed once
// for all rows of a thread.
#include "dropout_add/dropout_add.h"

#include "base/tiles.h"

namespace {

constexpr int kRowsPerThread = 8;  // without a sum over rows

// Arguments shared by all blocks.
struct Call {
  int64_t row_count, columns;
  const int64_t* rows;  // null without dropout
  int32_t threshold;
  uint64_t column_base;
  float scale, multiplier;
  ColumnVector bias;
  bool aligned;  // all rows of all tensors begin at 16-byte boundaries
};

// The part of the hashes that belongs to a thread's pairs of columns.
template <typename T>
struct ColumnHashes {
  static constexpr int kPairs = Packet<T>::kSize / 2;
  uint32_t of[kPairs];

  __device__ __forceinline__ ColumnHashes(const Call& call, const OwnColumns<T>& own) {
    MEGATRON_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const int64_t first = own.tile + own.in_tile(2 * pair);
      of[pair] = call.rows != nullptr ? megatron::column_hash(first / 2, call.column_base) : 0;
    }
  }

  // The factors of the columns in a row: 0 or the dropout scale; 1 without dropout.
  __device__ __forceinline__ Values<T> factors(const Call& call, int64_t row) const {
    Values<T> factors;
    const uint32_t row_hash = call.rows != nullptr ? static_cast<uint32_t>(call.rows[row]) : 0;
    MEGATRON_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t bits = megatron::pair_bits(row_hash, of[pair]);
      factors.of[2 * pair] = megatron::dropout_factor(bits, call.threshold, call.scale);
      factors.of[2 * pair + 1] = megatron::dropout_factor(bits >> 16, call.threshold, call.scale);
    }
    return factors;
  }
};

// Rounds after each operation, as the composition of torch's operations does; `__fmul_rn` and `__fadd_rn` are never
// contracted.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    forward(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ residual, Call call) {
  const OwnColumns<T> own(call.columns, call.aligned);
  if (own.is_empty()) return;
  const Values<T> bias = own.load_vector(call.bias);
  const ColumnHashes<T> hashes(call, own);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kTileRows;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTileRows + threadIdx.y; row < call.row_count; row += step) {
    const int64_t at = row * call.columns;
    Values<T> values = own.load(x + at), added = {};
    if (residual != nullptr) added = own.load(residual + at);
    const Values<T> factors = hashes.factors(call, row);
    MEGATRON_UNROLL
    for (int i = 0; i < Packet<T>::kSize; ++i) {
      const float dropped = __fmul_rn(__fadd_rn(values.of[i], bias.of[i]), factors.of[i]);
      values.of[i] = __fadd_rn(added.of[i], __fmul_rn(dropped, call.multiplier));
    }
    own.store(y + at, values);
  }
}

// Block row `y` takes `rows_each` rows, striding over the grid; if there are `parts`, each of
// these groups of rows has a row of them.
template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    backward(T* __restrict__ dx, float* __restrict__ parts, const T* __restrict__ dy, Call call, int64_t rows_each) {
  const OwnColumns<T> own(call.columns, call.aligned);
  const ColumnHashes<T> hashes(call, own);
  for (int64_t part = blockIdx.y; part * rows_each < call.row_count; part += gridDim.y) {
    const int64_t end = (part + 1) * rows_each < call.row_count ? (part + 1) * rows_each : call.row_count;
    Values<T> sums = {};
    for (int64_t row = part * rows_each + threadIdx.y; row < end && !own.is_empty(); row += kTileRows) {
      const int64_t at = row * call.columns;
      Values<T> values = own.load(dy + at);
      const Values<T> factors = hashes.factors(call, row);
      MEGATRON_UNROLL
      for (int i = 0; i < Packet<T>::kSize; ++i) {
        values.of[i] = __fmul_rn(__fmul_rn(values.of[i], call.multiplier), factors.of[i]);
      }
      own.store(dx + at, values);
      add(sums, values);
    }
    if (parts != nullptr) own.store_part(parts + part * call.columns, sums);
  }
}

template <typename T>
Call call_of(const int64_t* rows, int64_t row_count, int64_t columns, int32_t threshold, uint64_t column_base,
             float multiplier) {
  const bool drops = rows != nullptr && threshold > 0;
  return {row_count,
          columns,
          drops ? rows : nullptr,
          drops ? threshold : 0,
          column_base,
          megatron::dropout_scale(drops ? threshold : 0),
          multiplier,
          {nullptr, DType::kFloat32},
          columns % Packet<T>::kSize == 0};
}

}  // namespace

extern "C" int megatron_dropout_add_forward(void* y, const void* x, const void* bias, const void* residual,
                                            const int64_t* rows, int64_t row_count, int64_t columns, int dtype,
                                            int bias_dtype, int32_t threshold, uint64_t column_base,
                                            float multiplier, void* stream) {
  return with_type(dtype, [&](auto element) {
    using T = decltype(element);
    Call call = call_of<T>(rows, row_count, columns, threshold, column_base, multiplier);
    call.bias = {bias, static_cast<DType>(bias_dtype)};
    call.aligned = call.aligned && is_aligned(y) && is_aligned(x) && is_aligned(residual);
    MEGATRON_LAUNCH((forward<T>), tile_grid<T>(row_count, kTileRows * kRowsPerThread, columns), tile_block(), 0,
                    stream, static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(residual), call);
    return static_cast<int>(cudaGetLastError());
  });
}

extern "C" int megatron_dropout_add_backward(void* dx, void* bias_gradient, float* bias_parts, const void* dy,
                                             const int64_t* rows, int64_t row_count, int64_t columns, int dtype,
                                             int bias_dtype, int32_t threshold, uint64_t column_base,
                                             float multiplier, void* stream) {
  float* parts = bias_gradient != nullptr ? bias_parts : nullptr;
  const int64_t rows_each = parts != nullptr ? megatron::rows_per_part(row_count) : kTileRows * kRowsPerThread;
  const int error = with_type(dtype, [&](auto element) {
    using T = decltype(element);
    Call call = call_of<T>(rows, row_count, columns, threshold, column_base, multiplier);
    call.aligned = call.aligned && is_aligned(dx) && is_aligned(dy);
    MEGATRON_LAUNCH((backward<T>), tile_grid<T>(row_count, rows_each, columns), tile_block(), 0, stream,
                    static_cast<T*>(dx), parts, static_cast<const T*>(dy), call, rows_each);
    return static_cast<int>(cudaGetLastError());
  });
  if (parts == nullptr || error != 0) return error;
  return launch_sum_parts(bias_gradient, bias_dtype, parts, blocks_for(row_count, rows_each), columns, stream);
}
