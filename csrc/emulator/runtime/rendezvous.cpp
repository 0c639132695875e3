// Where threads wait for each other: warp operations and barriers.
#include <cstdio>
#include <cstring>
#include <string>

#include "state.h"

namespace simt {
namespace {

const char* const kOperationNames[] = {"__syncwarp", "a vote", "a shuffle"};

bool is_in(unsigned lanes, int lane) { return (lanes >> lane & 1u) != 0; }

void note_meeting(Warp& warp, unsigned lanes) {
  ++warp.time;
  if (lanes == 0xffffffffu) {
    warp.all_synchronized = warp.time;
    return;
  }
  warp.has_met_in_part = true;
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 32; ++j) {
      if (is_in(lanes, i) && is_in(lanes, j)) warp.met[i][j] = warp.time;
    }
  }
}

uint64_t shuffled(const Gathering& gathering, int lane) {
  const int source = gathering.sources[lane];
  if (is_in(gathering.arrived, source)) return gathering.values[source];
  report("inactive lane", "the shuffle at " + place(gathering.file, gathering.line) + " gives lane " +
                              std::to_string(lane) + " the value of lane " + std::to_string(source) +
                              (is_in(gathering.mask, source) ? ", which has exited or does not exist"
                                                             : ", which is not in its mask"));
  return 0x7fc000007fc0dead;  // NaN in each format, so that the value shows too
}

// The hardware goes on without them, but what such code means is left to chance.
void report_returned_lanes(const Warp& warp, const Gathering& gathering) {
  char lanes[16];
  std::snprintf(lanes, sizeof lanes, "%08x", gathering.mask & warp.started & ~gathering.arrived);
  report("divergent warp", std::string(kOperationNames[gathering.operation]) + " at " +
                               place(gathering.file, gathering.line) + " ends without the lanes " + lanes +
                               " of its mask, which have returned");
}

// Releases the lanes of a gathering if all of its mask that still run have arrived.
bool is_completed(Warp& warp, int first_thread, std::size_t number) {
  Gathering& gathering = warp.gatherings[number];
  const unsigned needed = gathering.mask & warp.alive;
  if ((gathering.arrived & needed) != needed) return false;
  if ((gathering.mask & warp.started & ~gathering.arrived) != 0) report_returned_lanes(warp, gathering);
  uint64_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (is_in(gathering.arrived, lane) && gathering.values[lane] != 0) ballot |= uint64_t{1} << lane;
  }
  if (gathering.operation == kSynchronize) note_meeting(warp, gathering.arrived);
  for (int lane = 0; lane < 32; ++lane) {
    if (!is_in(gathering.arrived, lane)) continue;
    Thread& thread = threads[first_thread + lane];
    thread.received = gathering.operation == kShuffle ? shuffled(gathering, lane) : ballot;
    thread.state = ThreadState::kRunnable;
  }
  warp.gatherings.erase(warp.gatherings.begin() + number);
  return true;
}

std::size_t gathering_of(Warp& warp, int lane, int operation, unsigned mask, const char* file, int line) {
  for (std::size_t number = 0; number < warp.gatherings.size(); ++number) {
    const Gathering& gathering = warp.gatherings[number];
    if (gathering.mask == mask && !is_in(gathering.arrived, lane)) return number;
  }
  for (const Gathering& other : warp.gatherings) {
    if ((other.mask & mask) != 0) {
      report("divergent warp", std::string(kOperationNames[operation]) + " at " + place(file, line) +
                                   " and " + kOperationNames[other.operation] + " at " + place(other.file, other.line) +
                                   " wait for the same lanes with different masks");
    }
  }
  Gathering gathering{};
  gathering.mask = mask;
  gathering.operation = operation;
  gathering.file = file;
  gathering.line = line;
  warp.gatherings.push_back(gathering);
  return warp.gatherings.size() - 1;
}

void open_barrier() {
  for (unsigned number = 0; number < launch.threads; ++number) {
    Thread& thread = threads[number];
    if (thread.state != ThreadState::kAtBarrier) continue;
    thread.state = ThreadState::kRunnable;
    thread.received = static_cast<uint64_t>(launch.barrier.predicates);
  }
  launch.barrier = Barrier{};
  ++launch.interval;
}

}  // namespace

// A thread that returns is waited for no longer: its warp and its block may be complete without it.
void leave_block(Thread& thread) {
  thread.state = ThreadState::kExited;
  --launch.alive;
  Warp& warp = warps[thread.warp];
  warp.alive &= ~(1u << thread.lane);
  for (std::size_t number = 0; number < warp.gatherings.size();) {
    if (!is_completed(warp, thread.warp * 32, number)) ++number;
  }
  if (launch.barrier.waiting != 0 && launch.barrier.waiting == launch.alive) {
    report("divergent barrier", "a thread returned while the others of its block wait at " +
                                    place(launch.barrier.file, launch.barrier.line));
    open_barrier();
  }
}

}  // namespace simt

using namespace simt;

extern "C" uint64_t simt_warp_operation(int operation, unsigned mask, uint64_t value, int source, const char* file,
                                        int line) {
  OutsideKernel outside;
  Thread& thread = *running;
  Warp& warp = warps[thread.warp];
  if (!is_in(mask, thread.lane)) {
    report("divergent warp", std::string(kOperationNames[operation]) + " at " + place(file, line) +
                                 " is called by lane " + std::to_string(thread.lane) + ", which is not in its mask");
    abandon_launch();
  }
  const std::size_t number = gathering_of(warp, thread.lane, operation, mask, file, line);
  Gathering& gathering = warp.gatherings[number];
  if (gathering.operation != operation || gathering.line != line || std::strcmp(gathering.file, file) != 0) {
    report("divergent warp", "lanes of one warp meet in " + std::string(kOperationNames[operation]) + " at " +
                                 place(file, line) + " and in " + kOperationNames[gathering.operation] + " at " +
                                 place(gathering.file, gathering.line));
    abandon_launch();
  }
  gathering.arrived |= 1u << thread.lane;
  gathering.values[thread.lane] = value;
  gathering.sources[thread.lane] = source & 31;
  thread.state = ThreadState::kInWarpOperation;
  thread.waits_in = file;
  thread.waits_at = line;
  const bool is_last = is_completed(warp, thread.warp * 32, number);
  if (!is_last || launch.order != Order::kForward) wait_for_others();
  return thread.received;
}

extern "C" int simt_barrier(int predicate, const char* file, int line) {
  OutsideKernel outside;
  Thread& thread = *running;
  Barrier& barrier = launch.barrier;
  if (barrier.waiting == 0) {
    barrier.file = file;
    barrier.line = line;
  } else if (barrier.line != line || std::strcmp(barrier.file, file) != 0) {
    report("divergent barrier", "threads of one block wait at " + place(barrier.file, barrier.line) + " and at " +
                                    place(file, line));
  }
  if (launch.alive < launch.threads) {
    report("divergent barrier", "threads of the block had returned before the barrier at " + place(file, line));
  }
  ++barrier.waiting;
  barrier.predicates += predicate;
  thread.state = ThreadState::kAtBarrier;
  thread.waits_in = file;
  thread.waits_at = line;
  if (barrier.waiting == launch.alive) {
    open_barrier();
  } else {
    wait_for_others();
  }
  return static_cast<int>(thread.received);
}
