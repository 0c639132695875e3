// The buffers of a test, and what is remembered of each of their elements.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "state.h"

namespace simt {

constexpr int kFill = 0xff;  // a byte that nothing has written: NaN in every floating-point format

enum class AccessKind : uint8_t { kNone, kPlain, kAtomic, kPending };  // pending: a copy that was issued, not waited for

// When an element was last read or written, and by which lanes of which warp.
struct Access {
  uint32_t interval = 0;   // between which barriers (Launch::interval); 0 for never
  uint32_t warp_time = 0;  // after which __syncwarp (Warp::time)
  uint32_t lanes = 0;
  Site site = 0;
  uint16_t warp = 0;
  AccessKind kind = AccessKind::kNone;
};

struct Cell {
  bool is_written = false;
  Access write;
  Access reads[2];  // of different warps or blocks
};

struct FreeCells {
  void operator()(Cell* cells) const { std::free(cells); }
};

struct Region {
  char *begin = nullptr, *end = nullptr;
  size_t cell_bytes = 1;
  bool is_written = false;    // as a whole, from the start
  bool is_read_only = false;
  bool is_shared = false;    // forgotten at the start of every block
  std::string name;
  std::unique_ptr<Cell[], FreeCells> cells;  // zero pages until touched

  void allocate_cells();
  std::string describe(const char* address) const;
};

struct Buffer {
  Region region;
  char *accessible_begin = nullptr, *accessible_end = nullptr, *mapping = nullptr;
  size_t mapping_bytes = 0;
};

// The buffer that an address is in or beside.
Buffer* find_buffer(const void* address);

// Called before a launch, and before each of its blocks.
void start_watching_memory();
void forget_shared_memory();

// The shared array that an address is in, among those of the library of the running kernel, or null.
Region* find_shared_array(const char* address);

}  // namespace simt
