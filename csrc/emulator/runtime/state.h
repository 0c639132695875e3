// What the emulator knows of the launch that is running. One launch runs at a time, in one thread of the process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../include/simt_interface.h"
#include "fiber.h"

namespace simt {

// A position in the code, as an offset into the library of the kernels: what addr2line reads. 0 for none.
using Site = uint32_t;

struct AsynchronousCopy {
  char* destination;
  const char* source;
  unsigned bytes;
  int group;
  Site site;
};

enum class ThreadState : uint8_t { kRunnable, kAtBarrier, kInWarpOperation, kExited };

struct Thread {
  Context context;
  char* stack = nullptr;
  uint3 index{};
  int number = 0, warp = 0, lane = 0;
  ThreadState state = ThreadState::kExited;
  uint64_t received = 0;            // what the operation it waited for returns
  const char* waits_in = nullptr;  // file and line of that operation
  int waits_at = 0;
  std::vector<AsynchronousCopy> copies;
  int copy_group = 0;
};

// Lanes that have arrived at a warp operation and wait for the others of their mask.
struct Gathering {
  unsigned mask, arrived;
  int operation, line;
  const char* file;
  uint64_t values[32];
  int sources[32];
};

struct Warp {
  std::vector<Gathering> gatherings;
  unsigned started = 0, alive = 0;  // lanes
  uint32_t time = 1;                // of the last __syncwarp; counts up
  uint32_t all_synchronized = 0;  // when all lanes last met
  bool has_met_in_part = false;
  uint32_t met[32][32] = {};  // when two lanes last met
};

struct Barrier {
  unsigned waiting = 0;
  int predicates = 0;
  const char* file = nullptr;
  int line = 0;
};

enum class Order : int { kForward, kReverse, kRandom };

struct Launch {
  const char* name = "";
  uint3 grid{}, block{}, block_index{};
  unsigned threads = 0, alive = 0;
  void (*kernel)(void*) = nullptr;
  char* arguments = nullptr;
  size_t argument_bytes = 0, shared_bytes = 0;
  // Intervals between barriers are numbered through all launches: a smaller number than that of the launch or the block
  // is of an earlier one.
  uint32_t interval = 0, first_of_launch = 0, first_of_block = 0;
  Barrier barrier;
  Order order = Order::kForward;
  uint64_t random = 1;
  bool is_abandoned = false;
};

// The library that the kernels are in, in memory.
struct Image {
  char *begin = nullptr, *end = nullptr, *writable_begin = nullptr, *writable_end = nullptr;
};

extern Launch launch;
extern Image image;
extern std::vector<Thread> threads;
extern std::vector<Warp> warps;
extern Thread* running;   // null outside kernels
extern bool is_in_kernel;  // false in the runtime's own code, whose accesses are not checked
extern char* dynamic_shared;

inline Site site_of(const void* return_address) {
  const char* address = static_cast<const char*>(return_address);
  return address > image.begin && address < image.end ? static_cast<Site>(address - image.begin - 1) : 0;
}

// Gives the processor to other threads of the block.
void wait_for_others();

// Ends the launch from inside a kernel, after what cannot be continued.
[[noreturn]] void abandon_launch();

// Within it, accesses are the runtime's own.
class OutsideKernel {
 public:
  OutsideKernel() : before_(is_in_kernel) { is_in_kernel = false; }
  ~OutsideKernel() { is_in_kernel = before_; }

 private:
  bool before_;
};

// --- diagnosis.cpp ---

// Notes what was found, once for every kind and site (without a site: for every kind and text).
void report(const char* kind, const std::string& text, Site site = 0);
std::string place(const char* file, int line);
std::string mention(Site site);

// --- faults.cpp ---

void catch_faults();
void stop_catching_faults();

}  // namespace simt
