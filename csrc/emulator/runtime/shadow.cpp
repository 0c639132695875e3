// What an access of a kernel may do: where it may be, and which accesses of other threads it may meet.
//
// Two accesses of a block are ordered by a barrier between them, those of a warp also by a __syncwarp between their
// lanes. Shuffles and votes order nothing. Blocks of a launch are not ordered at all, launches are.
#include "shadow.h"

#include <cstdio>
#include <cstring>

#include "memory.h"

namespace simt {
namespace {

Region dynamic_region;

bool is_ordered(const Access& earlier) {
  if (earlier.interval < launch.first_of_block) return false;
  if (earlier.interval != launch.interval) return true;
  if (earlier.warp != running->warp) return false;
  const Warp& warp = warps[earlier.warp];
  if (warp.all_synchronized > earlier.warp_time) return true;
  for (unsigned others = earlier.lanes & ~(1u << running->lane); others != 0; others &= others - 1) {
    if (warp.met[__builtin_ctz(others)][running->lane] <= earlier.warp_time) return false;
  }
  return true;
}

bool is_race(const Access& earlier, uint32_t since, AccessKind kind) {
  if (earlier.kind == AccessKind::kNone || earlier.interval < since) return false;
  if (earlier.kind == AccessKind::kAtomic && kind == AccessKind::kAtomic) return false;
  return !is_ordered(earlier);
}

std::string by_whom(const Access& access) {
  char text[96];
  const bool is_this_block = access.interval >= launch.first_of_block;
  std::snprintf(text, sizeof text, " (%s, warp %u, lanes %08x)", is_this_block ? "this block" : "another block",
                access.warp, access.lanes);
  return mention(access.site) + text;
}

void note_read(Cell& cell, const Access& access) {
  Access& last = cell.reads[0];
  const bool is_same_warp =
      last.warp == access.warp && (last.interval >= launch.first_of_block) == (access.interval >= launch.first_of_block);
  if (last.kind == AccessKind::kNone) {
    last = access;
  } else if (is_same_warp && last.interval == access.interval && last.warp_time == access.warp_time) {
    last.lanes |= access.lanes;
  } else {
    if (!is_same_warp) cell.reads[1] = last;
    last = access;
  }
}

// The whole of the check for one element.
void check_cell(Region& region, Cell& cell, const char* address, const Request& request, const Access& access) {
  const uint32_t since = region.is_shared ? launch.first_of_block : launch.first_of_launch;
  const bool is_written =
      region.is_written || (cell.is_written && (!region.is_shared || cell.write.interval >= since));
  if (request.reads && !is_written) {
    report("uninitialised", "read of " + region.describe(address) + ", which nothing has written", access.site);
  }
  const char* verb = request.kind == AccessKind::kAtomic ? "atomic access to " : request.writes ? "write to " : "read of ";
  if (is_race(cell.write, since, request.kind)) {
    report("race", verb + region.describe(address) + " and the write in " + by_whom(cell.write), access.site);
  }
  if (request.writes) {
    for (const Access& read : cell.reads) {
      if (is_race(read, since, request.kind)) {
        report("race", verb + region.describe(address) + " and the read in " + by_whom(read), access.site);
      }
    }
    cell.write = access;
    cell.is_written = request.kind != AccessKind::kPending;
    if (request.kind == AccessKind::kPending) cell.write.kind = AccessKind::kPlain;
  }
  if (request.reads && request.kind != AccessKind::kAtomic) note_read(cell, access);
}

void check_cells(Region& region, const char* address, const Request& request) {
  if (!region.cells) region.allocate_cells();
  Access access;
  access.interval = launch.interval;
  access.warp_time = warps[running->warp].time;
  access.lanes = 1u << running->lane;
  access.site = request.site;
  access.warp = static_cast<uint16_t>(running->warp);
  access.kind = request.kind;
  const size_t offset = static_cast<size_t>(address - region.begin);
  const size_t last = (offset + request.bytes - 1) / region.cell_bytes;
  for (size_t number = offset / region.cell_bytes; number <= last; ++number) {
    check_cell(region, region.cells[number], region.begin + number * region.cell_bytes, request, access);
  }
}

[[noreturn]] void refuse(const char* kind, const std::string& text, Site site) {
  report(kind, text, site);
  abandon_launch();
}

std::string describe(const Request& request) {
  return std::string(request.writes ? "write" : "read") + " of " + std::to_string(request.bytes) + " bytes at ";
}

void check_buffer(const char* address, const Request& request) {
  Buffer* buffer = find_buffer(address);
  if (buffer == nullptr) refuse("out of bounds", describe(request) + "an address outside every buffer", request.site);
  Region& region = buffer->region;
  if (address < region.begin || address + request.bytes > region.end) {
    refuse("out of bounds", describe(request) + region.describe(address), request.site);
  }
  if (request.is_aligned && reinterpret_cast<uintptr_t>(address) % request.bytes != 0) {
    refuse("misaligned", describe(request) + region.describe(address), request.site);
  }
  if (request.writes && region.is_read_only) {
    report("read-only", "write to " + region.describe(address) + ", an input", request.site);
  }
  check_cells(region, address, request);
}

void check_static(const char* address, const Request& request) {
  Region* array = find_shared_array(address);
  if (array == nullptr) refuse("out of bounds", describe(request) + "a variable of the host", request.site);
  if (address + request.bytes > array->end) {
    refuse("out of bounds", describe(request) + array->describe(address), request.site);
  }
  check_cells(*array, address, request);
}

bool is_private(const char* address, const Request& request) {
  if (address >= running->stack && address < running->stack + kStackBytes) return true;
  return !request.writes && address >= launch.arguments && address < launch.arguments + launch.argument_bytes;
}

}  // namespace

void check_access(const void* pointer, const Request& request) {
  const char* address = static_cast<const char*>(pointer);
  if (!is_in_kernel || request.bytes == 0 || is_private(address, request)) return;
  OutsideKernel outside;
  if (address >= image.writable_begin && address < image.writable_end) {
    check_static(address, request);
  } else if (address >= dynamic_region.begin - kPageBytes && address < dynamic_region.end + kPageBytes) {
    if (address < dynamic_region.begin || address + request.bytes > dynamic_region.end) {
      refuse("out of bounds", describe(request) + dynamic_region.describe(address), request.site);
    }
    check_cells(dynamic_region, address, request);
  } else if (address >= image.begin && address < image.end) {
    if (request.writes) refuse("read-only", "write to a constant of the library", request.site);
  } else {
    check_buffer(address, request);
  }
}

void start_watching_memory() {
  char* end = dynamic_shared + launch.shared_bytes;
  if (dynamic_region.begin == dynamic_shared && dynamic_region.end == end) return;
  dynamic_region.cells.reset();
  dynamic_region.begin = dynamic_shared;
  dynamic_region.end = end;
  dynamic_region.name = "dynamic shared memory";
  dynamic_region.is_shared = true;
}

}  // namespace simt
