// Lookup of rows of a vocabulary shard, and its deterministic gradient: the C interface.
#pragma once

#include "base/portable.h"

namespace megatron {

constexpr int64_t kChunkPositions = 64;  // sorted positions that a block of threads sums

}  // namespace megatron

extern "C" {

// rows[i] = weight[ids[i] - first_row], or zeros if the shard lacks that row.
// Shapes: rows `[n, h]`, weight `[shard_rows, h]`, ids `[n]`.
int megatron_embedding_forward(void* rows, const void* weight, const int64_t* ids, int64_t count, int64_t shard_rows,
                               int64_t columns, int64_t first_row, int dtype, void* stream);

// Sums the rows of `gradient` of each id, in the order of their positions; `result` must be zero before.
// `sorted_ids` are the ids in ascending order, `positions` their positions; `partial_sums` is scratch for two rows of
// float32 for each chunk of kChunkPositions.
// Shapes: result `[shard_rows, h]`, gradient `[n, h]`, sorted_ids and positions `[n]`, partial_sums `[chunks, 2, h]`.
int megatron_embedding_backward(void* result, const void* gradient, const int64_t* sorted_ids,
                                const int64_t* positions, float* partial_sums, int64_t count, int64_t shard_rows,
                                int64_t columns, int64_t first_row, int dtype, void* stream);
}
