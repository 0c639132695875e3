// Small kernels, each right or with one defect (`broken`), which the emulator must find, or the values must show.
#include "base/device.h"

namespace {

constexpr int kThreads = 64;

// Reverses a block through shared memory. Broken: reads before the others have written.
__global__ void missing_barrier(float* out, const float* in, bool broken) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!broken) __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

// The same twice with one tile. Broken: the second turn overwrites what others have yet to read.
__global__ void missing_barrier_before_reuse(float* out, const float* in, bool broken) {
  __shared__ float tile[kThreads];
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    tile[threadIdx.x] = in[threadIdx.x] + static_cast<float>(turn);
    __syncthreads();
    sum += tile[kThreads - 1 - threadIdx.x];
    if (!broken) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// Copies any number of elements. Broken: one too many.
__global__ void one_too_far(float* out, const float* in, int64_t count, bool broken) {
  for (int64_t i = threadIdx.x; i < count + (broken ? 1 : 0); i += kThreads) out[i] = in[i];
}

// Copies 16 bytes at a time behind a peeled head. Broken: takes every row for aligned.
__global__ void misaligned_packet(float* out, const float* in, int64_t count, bool broken) {
  const int64_t head = broken ? 0 : elements_to_alignment(in, count);
  const int64_t packets = (count - head) / 4;
  for (int64_t i = threadIdx.x; i < head; i += kThreads) out[i] = in[i];
  for (int64_t i = threadIdx.x; i < packets; i += kThreads) {
    const Packet<float> packet = load_packet(in + head + 4 * i);
    for (int k = 0; k < 4; ++k) out[head + 4 * i + k] = packet.values[k];
  }
  for (int64_t i = head + 4 * packets + threadIdx.x; i < count; i += kThreads) out[i] = in[i];
}

__global__ void return_before_barrier(float* out, const float* in, int64_t count, bool broken) {
  __shared__ float tile[kThreads];
  if (broken && threadIdx.x >= count / 2) return;
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void barriers_in_two_branches(float* out, const float* in, bool broken) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  if (broken && threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void barrier_in_one_branch(float* out, const float* in, bool broken) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!broken || threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x] + 0.0f * tile[threadIdx.x];
}

// Every block adds to the same elements. Broken: without an atomic.
__global__ void plain_addition_across_blocks(float* out, const float* in, bool broken) {
  if (broken) {
    out[threadIdx.x] += in[threadIdx.x];
  } else {
    atomicAdd(out + threadIdx.x, in[threadIdx.x]);
  }
}

// A prefix of each row of eight. Broken: a different one, which only its values show.
__global__ void mask_off_by_one(float* out, const float* in, bool broken) {
  const int row = threadIdx.x / 8, column = threadIdx.x % 8;
  out[threadIdx.x] = column < row + (broken ? 0 : 1) ? in[threadIdx.x] : 0.0f;
}

// Sums of warps. Broken: takes one more than there are, still inside the array.
__global__ void one_partial_sum_too_many(float* out, const float* in, bool broken) {
  __shared__ float parts[kWarp];
  const float sum = warp_reduce(in[threadIdx.x], Sum());
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sum;
  __syncthreads();
  float all = 0.0f;
  for (int warp = 0; warp < kThreads / kWarp + (broken ? 1 : 0); ++warp) all += parts[warp];
  out[threadIdx.x] = all;
}

__global__ void shuffle_in_a_branch(float* out, const float* in, bool broken) {
  float value = in[threadIdx.x];
  if (!broken || threadIdx.x % kWarp < 20) value += __shfl_xor_sync(kFullWarp, value, 1);
  out[threadIdx.x] = value;
}

// Neighbours exchange through shared memory. Broken: relies on lanes that run in step.
__global__ void lock_step(float* out, const float* in, bool broken) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!broken) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void shuffle_from_outside_the_mask(float* out, const float* in, bool broken) {
  float value = in[threadIdx.x];
  if (threadIdx.x % kWarp < 16) value += __shfl_xor_sync(0x0000ffffu, value, broken ? 16 : 8);
  out[threadIdx.x] = value;
}

__global__ void caller_outside_its_mask(float* out, const float* in, bool broken) {
  float value = in[threadIdx.x];
  const unsigned mask = broken || threadIdx.x % kWarp < 16 ? 0x0000ffffu : 0xffff0000u;
  value += __shfl_xor_sync(mask, value, 1);
  out[threadIdx.x] = value;
}

__global__ void different_warp_operations(float* out, const float* in, bool broken) {
  float value = in[threadIdx.x];
  if (broken && threadIdx.x % 2 == 0) {
    value += static_cast<float>(__any_sync(kFullWarp, value > 0.0f));
  } else {
    value += __shfl_xor_sync(kFullWarp, value, 2);
  }
  out[threadIdx.x] = value;
}

__global__ void overlapping_masks(float* out, const float* in, bool broken) {
  float value = in[threadIdx.x];
  const bool is_low = threadIdx.x % kWarp < 16;
  const unsigned mask = is_low ? (broken ? 0x0001ffffu : 0x0000ffffu) : 0xffff0000u;
  value += __shfl_xor_sync(mask, value, 1);
  out[threadIdx.x] = value;
}

template <int size>
__global__ void fixed_array_overflow(float* out, const float* in, bool broken) {
  __shared__ float tile[size], other[size];
  other[threadIdx.x] = 0.0f;
  tile[threadIdx.x + (broken ? 1 : 0)] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x] + other[threadIdx.x];
}

__global__ void overflow_of_an_index(float* out, const float* in, int64_t count, bool broken) {
  const int row = broken ? 1 << 26 : 1;
  const int offset = row * static_cast<int>(count) - row * static_cast<int>(count - 1) - row;
  out[threadIdx.x] = in[threadIdx.x + offset];
}

__global__ void division_by_zero(float* out, const float* in, int64_t count, bool broken) {
  out[threadIdx.x] = in[threadIdx.x % static_cast<int>(broken ? count - kThreads : count)];
}

__global__ void shift_too_wide(float* out, const float* in, bool broken) {
  out[threadIdx.x] = in[threadIdx.x] * static_cast<float>((1u << (broken ? threadIdx.x : threadIdx.x % 32)) & 1u);
}

__global__ void write_to_an_input(float* out, const float* in, bool broken) {
  out[threadIdx.x] = in[threadIdx.x];
  if (broken) const_cast<float*>(in)[threadIdx.x] = 0.0f;
}

__global__ void elements_left_out(float* out, const float* in, bool broken) {
  if (!broken || threadIdx.x != 5) out[threadIdx.x] = in[threadIdx.x];
}

// Broken: reads an output that nothing has written.
__global__ void read_of_an_output(float* out, const float* in, bool broken) {
  out[threadIdx.x] = broken ? out[threadIdx.x] + in[threadIdx.x] : in[threadIdx.x];
}

__global__ void wild_pointer(float* out, const float* in, bool broken) {
  const uintptr_t address = broken ? 4096 : reinterpret_cast<uintptr_t>(in);
  out[threadIdx.x] = reinterpret_cast<const float*>(address)[threadIdx.x];
}

// Broken: the launcher asks for half of the shared memory that this takes.
__global__ void too_little_shared_memory(float* out, const float* in) {
  MEGATRON_DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Broken: an element is counted atomically and read plainly.
__global__ void atomic_beside_a_read(float* out, const float* in, bool broken) {
  const float before = broken && threadIdx.x == 0 ? out[1] : 0.0f;
  atomicAdd(out + threadIdx.x / 2, in[threadIdx.x] + 0.0f * before);
}

__global__ void stack_overflow(float* out, const float* in, bool broken) {
  float values[4];
  values[threadIdx.x & 3] = in[threadIdx.x];
  volatile char* below = reinterpret_cast<volatile char*>(values);
  if (broken) below[-65536] = 0;
  out[threadIdx.x] = values[threadIdx.x & 3];
}

// Broken: waits for another thread of its warp, which on the emulator, and on old GPUs, never gets its turn.
__global__ void spin_wait(float* out, const float* in, bool broken) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (broken) {
    while (threadIdx.x < kThreads && flag == 0) continue;
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// Two tiles that are filled by asynchronous copies, one ahead.
// Broken 1: does not wait for the copy it reads. 2: no barrier after the wait. 3: none before a tile is filled again.
__global__ void asynchronous_copies(float* out, const float* in, int64_t tiles, int broken) {
  __shared__ __align__(16) float tile[2][4 * kThreads];
  const int thread = threadIdx.x;
  float sum = 0.0f;
  __pipeline_memcpy_async(tile[0] + 4 * thread, in + 4 * thread, 16);
  __pipeline_commit();
  for (int64_t k = 0; k < tiles; ++k) {
    if (k + 1 < tiles) {
      __pipeline_memcpy_async(tile[(k + 1) % 2] + 4 * thread, in + (k + 1) * 4 * kThreads + 4 * thread, 16);
      __pipeline_commit();
    }
    if (k + 1 < tiles) {
      __pipeline_wait_prior(broken == 1 ? 2 : 1);
    } else {
      __pipeline_wait_prior(0);
    }
    if (broken != 2) __syncthreads();
    sum += tile[k % 2][4 * (kThreads - 1 - thread)];
    if (broken != 3) __syncthreads();
  }
  out[thread] = sum;
}

__global__ void to_16_bits(uint16_t* out, const float* in, int64_t count, int dtype) {
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    out[i] = dtype == megatron::kFloat16 ? __half_as_ushort(__float2half_rn(in[i]))
                                         : __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
  }
}

__global__ void from_16_bits(float* out, const uint16_t* in, int64_t count, int dtype) {
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    out[i] = dtype == megatron::kFloat16 ? __half2float(__ushort_as_half(in[i]))
                                         : __bfloat162float(__ushort_as_bfloat16(in[i]));
  }
}

// One value of each warp operation and barrier for every thread, in rows of `out`.
__global__ void collectives(int* out, const int* in) {
  const int thread = threadIdx.x, value = in[thread];
  int row = 0;
  const auto keep = [&](int result) { out[row++ * kThreads + thread] = result; };
  keep(__shfl_sync(kFullWarp, value, 3));
  keep(__shfl_sync(kFullWarp, value, thread + 1, 8));
  keep(__shfl_xor_sync(kFullWarp, value, 5));
  keep(__shfl_down_sync(kFullWarp, value, 3));
  keep(__shfl_down_sync(kFullWarp, value, 3, 8));
  keep(__shfl_up_sync(kFullWarp, value, 2, 16));
  keep(static_cast<int>(__ballot_sync(kFullWarp, value % 3 == 0)));
  keep(__any_sync(kFullWarp, value == 5));
  keep(__all_sync(kFullWarp, value < 32));
  keep(__syncthreads_count(value % 5 == 0));
  keep(__syncthreads_or(value == 63));
  keep(__syncthreads_and(value < 63));
}

}  // namespace

#define PLANTED(number, kernel, blocks, threads, shared_bytes, ...)                            \
  case number:                                                                                 \
    MEGATRON_LAUNCH((kernel), (blocks), (threads), (shared_bytes), stream, out, in __VA_ARGS__); \
    break;

extern "C" int megatron_planted(float* out, const float* in, int64_t count, int defect, int variant, void* stream) {
  const bool broken = variant != 0;
  switch (defect) {
    PLANTED(0, missing_barrier, 1, kThreads, 0, , broken)
    PLANTED(1, missing_barrier_before_reuse, 1, kThreads, 0, , broken)
    PLANTED(2, one_too_far, 1, kThreads, 0, , count, broken)
    PLANTED(3, misaligned_packet, 1, kThreads, 0, , count, broken)
    PLANTED(4, return_before_barrier, 1, kThreads, 0, , count, broken)
    PLANTED(5, barriers_in_two_branches, 1, kThreads, 0, , broken)
    PLANTED(6, barrier_in_one_branch, 1, kThreads, 0, , broken)
    PLANTED(7, plain_addition_across_blocks, 3, kThreads, 0, , broken)
    PLANTED(8, mask_off_by_one, 1, kThreads, 0, , broken)
    PLANTED(9, one_partial_sum_too_many, 1, kThreads, 0, , broken)
    PLANTED(10, shuffle_in_a_branch, 1, kThreads, 0, , broken)
    PLANTED(11, lock_step, 1, kThreads, 0, , broken)
    PLANTED(12, shuffle_from_outside_the_mask, 1, kThreads, 0, , broken)
    PLANTED(13, caller_outside_its_mask, 1, kThreads, 0, , broken)
    PLANTED(14, different_warp_operations, 1, kThreads, 0, , broken)
    PLANTED(15, overlapping_masks, 1, kThreads, 0, , broken)
    PLANTED(16, fixed_array_overflow<kThreads>, 1, kThreads, 0, , broken)
    PLANTED(17, overflow_of_an_index, 1, kThreads, 0, , count, broken)
    PLANTED(18, division_by_zero, 1, kThreads, 0, , count, broken)
    PLANTED(19, shift_too_wide, 1, kThreads, 0, , broken)
    PLANTED(20, write_to_an_input, 1, kThreads, 0, , broken)
    PLANTED(21, elements_left_out, 1, kThreads, 0, , broken)
    PLANTED(22, read_of_an_output, 1, kThreads, 0, , broken)
    PLANTED(23, wild_pointer, 1, kThreads, 0, , broken)
    PLANTED(24, too_little_shared_memory, 1, kThreads, kThreads * (broken ? 2 : 4))
    PLANTED(25, atomic_beside_a_read, 1, kThreads, 0, , broken)
    PLANTED(26, stack_overflow, 1, kThreads, 0, , broken)
    PLANTED(27, spin_wait, 1, kThreads, 0, , broken)
    PLANTED(28, asynchronous_copies, 1, kThreads, 0, , count / (4 * kThreads), variant)
    PLANTED(29, mask_off_by_one, 1, broken ? 1088 : kThreads, 0, , false)
    PLANTED(30, too_little_shared_memory, 1, kThreads, broken ? 65536 : kThreads * 4)
    case 31:
      return cudaMemsetAsync(out, 0, sizeof(float) * (count + (broken ? 1 : 0)), nullptr);
    default:
      return 1;  // cudaErrorInvalidValue
  }
  return static_cast<int>(cudaGetLastError());
}

extern "C" int megatron_convert(void* out, const void* in, int64_t count, int dtype, bool narrows, void* stream) {
  if (narrows) {
    MEGATRON_LAUNCH(to_16_bits, 1, kThreads, 0, stream, static_cast<uint16_t*>(out), static_cast<const float*>(in),
                    count, dtype);
  } else {
    MEGATRON_LAUNCH(from_16_bits, 1, kThreads, 0, stream, static_cast<float*>(out), static_cast<const uint16_t*>(in),
                    count, dtype);
  }
  return static_cast<int>(cudaGetLastError());
}

extern "C" int megatron_collectives(int* out, const int* in, void* stream) {
  MEGATRON_LAUNCH(collectives, 1, kThreads, 0, stream, out, in);
  return static_cast<int>(cudaGetLastError());
}
