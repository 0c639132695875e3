// Runs a grid: one block after another, each thread of a block as a fiber that runs until it waits for others.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "memory.h"
#include "state.h"

namespace simt {

Launch launch;
Image image;
std::vector<Thread> threads;
std::vector<Warp> warps;
Thread* running = nullptr;
bool is_in_kernel = false;
char* dynamic_shared = nullptr;

void leave_block(Thread& thread);

namespace {

constexpr size_t kSharedBytes = 48 * 1024;         // without cudaFuncSetAttribute
constexpr size_t kMostSharedBytes = 227 * 1024;  // of a block, since compute capability 9.0

Context scheduler;
int last_error = 0;
size_t allowed_shared_bytes = kSharedBytes;

void run_thread() {
  is_in_kernel = true;
  launch.kernel(launch.arguments);
  is_in_kernel = false;
  leave_block(*running);
  for (;;) wait_for_others();
}

void resume(Thread& thread) {
  running = &thread;
  switch_context(scheduler, thread.context);
  running = nullptr;
}

uint64_t next_random() {  // xorshift64, G. Marsaglia, Journal of Statistical Software 8(14), 2003
  uint64_t& state = launch.random;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void report_deadlock() {
  std::map<std::string, int> waiting;
  for (unsigned number = 0; number < launch.threads; ++number) {
    const Thread& thread = threads[number];
    if (thread.state == ThreadState::kExited) continue;
    ++waiting[(thread.state == ThreadState::kAtBarrier ? "at the barrier at " : "in the warp operation at ") +
              place(thread.waits_in, thread.waits_at)];
  }
  std::string text;
  for (const auto& group : waiting) text += std::to_string(group.second) + " threads wait " + group.first + ", ";
  report("deadlock", text + std::to_string(launch.threads - launch.alive) + " have returned");
}

void start_block() {
  launch.alive = launch.threads;
  launch.barrier = Barrier{};
  launch.first_of_block = ++launch.interval;
  forget_shared_memory();
  for (Warp& warp : warps) {
    warp.gatherings.clear();
    warp.started = 0;
    warp.time = 1;
    warp.all_synchronized = 0;
    if (warp.has_met_in_part) std::memset(warp.met, 0, sizeof warp.met);
    warp.has_met_in_part = false;
  }
  const uint3 size = launch.block;
  for (unsigned number = 0; number < launch.threads; ++number) {
    Thread& thread = threads[number];
    thread.number = static_cast<int>(number);
    thread.warp = thread.number / 32;
    thread.lane = thread.number % 32;
    thread.index = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    thread.state = ThreadState::kRunnable;
    thread.copies.clear();
    thread.copy_group = 0;
    warps[thread.warp].started |= 1u << thread.lane;
    prepare(thread.context, thread.stack, run_thread);
  }
  for (Warp& warp : warps) warp.alive = warp.started;
}

void run_block(std::vector<unsigned>& turns) {
  start_block();
  while (launch.alive != 0 && !launch.is_abandoned) {
    if (launch.order == Order::kRandom) {
      for (unsigned last = launch.threads - 1; last != 0; --last) {
        std::swap(turns[last], turns[next_random() % (last + 1)]);
      }
    }
    bool has_run = false;
    for (const unsigned number : turns) {
      if (threads[number].state != ThreadState::kRunnable) continue;
      has_run = true;
      resume(threads[number]);
      if (launch.is_abandoned) return;
    }
    if (!has_run) {
      report_deadlock();
      launch.is_abandoned = true;
    }
  }
}

bool has_valid_configuration(uint64_t blocks) {
  const uint3 grid = launch.grid, block = launch.block;
  std::string problem;
  if (launch.threads == 0 || launch.threads > 1024) {
    problem = "a block of " + std::to_string(launch.threads) + " threads; 1 to 1024 are possible";
  } else if (block.z > 64) {
    problem = "a block of depth " + std::to_string(block.z) + "; at most 64 is possible";
  } else if (blocks == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    problem = "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) +
              " blocks; each must be at least 1, the first at most 2147483647, the others 65535";
  } else if (launch.shared_bytes > allowed_shared_bytes) {
    problem = std::to_string(launch.shared_bytes) + " bytes of dynamic shared memory, of which " +
              std::to_string(allowed_shared_bytes) + " are allowed (cudaFuncSetAttribute)";
  }
  if (problem.empty()) return true;
  report("launch", problem);
  last_error = 9;  // cudaErrorInvalidConfiguration
  return false;
}

void find_image(const void* kernel) {
  image = Image{};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* wanted) {
        char* base = reinterpret_cast<char*>(info->dlpi_addr);
        Image found{base, base, nullptr, nullptr};
        bool is_wanted = false;
        for (int number = 0; number < info->dlpi_phnum; ++number) {
          const auto& part = info->dlpi_phdr[number];
          if (part.p_type != PT_LOAD) continue;
          char* begin = base + part.p_vaddr;
          char* end = begin + part.p_memsz;
          is_wanted |= wanted >= begin && wanted < end;
          found.end = std::max(found.end, end);
          if ((part.p_flags & PF_W) != 0) {
            found.writable_begin = begin;
            found.writable_end = end;
          }
        }
        if (is_wanted) image = found;
        return is_wanted ? 1 : 0;
      },
      const_cast<void*>(kernel));
}

void make_threads() {
  const size_t needed = (launch.threads + 31) / 32 * 32;
  while (threads.size() < needed) {
    threads.emplace_back();
    threads.back().stack = allocate_stack();
  }
  warps.resize(needed / 32);
}

// The end is at an inaccessible page, but for what keeps the beginning aligned to 16 bytes, as CUDA does.
void place_dynamic_shared() {
  static char* const end = [] {
    void* mapping = mmap(nullptr, kMostSharedBytes + 2 * kPageBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char* guard = static_cast<char*>(mapping) + (kMostSharedBytes / kPageBytes + 1) * kPageBytes;
    mprotect(guard, kPageBytes, PROT_NONE);
    return guard;
  }();
  dynamic_shared = end - (launch.shared_bytes + 15) / 16 * 16;
}

}  // namespace

void wait_for_others() { switch_context(running->context, scheduler); }

void abandon_launch() {
  launch.is_abandoned = true;
  is_in_kernel = false;
  running->state = ThreadState::kExited;
  for (;;) wait_for_others();
}

}  // namespace simt

using namespace simt;

extern "C" {

uint3 simt_thread_index() { return running->index; }
uint3 simt_block_index() { return launch.block_index; }
uint3 simt_block_dimensions() { return launch.block; }
uint3 simt_grid_dimensions() { return launch.grid; }
void* simt_dynamic_shared() { return dynamic_shared; }

void simt_launch(const char* name, uint3 grid, uint3 block, size_t shared_bytes, void (*kernel)(void*), void* arguments,
                 size_t argument_bytes) {
  launch.name = name;
  launch.grid = grid;
  launch.block = block;
  launch.block_index = {0, 0, 0};
  launch.threads = block.x * block.y * block.z;
  launch.kernel = kernel;
  launch.arguments = static_cast<char*>(arguments);
  launch.argument_bytes = argument_bytes;
  launch.shared_bytes = shared_bytes;
  launch.is_abandoned = false;
  launch.first_of_launch = ++launch.interval;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (!has_valid_configuration(blocks)) return;
  find_image(reinterpret_cast<const void*>(kernel));
  make_threads();
  place_dynamic_shared();
  start_watching_memory();
  std::vector<unsigned> turns(launch.threads);
  for (unsigned turn = 0; turn < launch.threads; ++turn) {
    turns[turn] = launch.order == Order::kReverse ? launch.threads - 1 - turn : turn;
  }
  catch_faults();
  for (uint64_t turn = 0; turn < blocks && !launch.is_abandoned; ++turn) {
    const uint64_t number = launch.order == Order::kReverse ? blocks - 1 - turn : turn;
    launch.block_index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                          static_cast<unsigned>(number / (uint64_t{grid.x} * grid.y))};
    run_block(turns);
  }
  stop_catching_faults();
  if (launch.is_abandoned) last_error = 719;  // cudaErrorLaunchFailure
}

int simt_last_error() {
  const int error = last_error;
  last_error = 0;
  return error;
}

int simt_allow_shared_bytes(const void*, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMostSharedBytes) return 1;  // cudaErrorInvalidValue
  allowed_shared_bytes = std::max(kSharedBytes, static_cast<size_t>(bytes));
  return 0;
}

// Order 0 is forward, 1 reverse, 2 random.
void simt_set_order(int order, uint64_t seed) {
  launch.order = static_cast<Order>(order);
  launch.random = seed * 0x9e3779b97f4a7c15u + 1;
  if (launch.random == 0) launch.random = 1;
}

}  // extern "C"
