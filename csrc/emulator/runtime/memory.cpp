// Buffers between inaccessible pages. What lies between a buffer and those pages must not change.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <string>

namespace simt {
namespace {

constexpr size_t kGuardBytes = 1 << 20;
constexpr size_t kBaseAlignment = 256;  // that of cudaMalloc

std::map<const char*, Buffer> buffers;  // by the beginning of the mapping
Buffer* last_found = nullptr;

bool is_within(const Buffer& buffer, const void* address) {
  return address >= buffer.mapping && address < buffer.mapping + buffer.mapping_bytes;
}

// What is around a buffer: differs from place to place, so that a copy of one margin to another shows. Mixed as in
// splitmix64: with a product alone, bytes at the same distance differ by the same amount, which is 0 for some distances.
char margin_at(const char* address) {
  uint64_t bits = reinterpret_cast<uintptr_t>(address);
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return static_cast<char>(bits ^ bits >> 31);
}

void fill_margin(char* begin, const char* end) {
  for (char* byte = begin; byte < end; ++byte) *byte = margin_at(byte);
}

bool is_margin(const char* begin, const char* end) {
  for (const char* byte = begin; byte < end; ++byte) {
    if (*byte != margin_at(byte)) return false;
  }
  return true;
}

}  // namespace

void Region::allocate_cells() {
  const size_t count = (static_cast<size_t>(end - begin) + cell_bytes - 1) / cell_bytes;
  cells.reset(static_cast<Cell*>(std::calloc(count + 1, sizeof(Cell))));
}

std::string Region::describe(const char* address) const {
  const long offset = address - begin;
  return name + (offset < 0 ? " - " : " + ") + std::to_string(offset < 0 ? -offset : offset) + " of " +
         std::to_string(end - begin) + " bytes";
}

Buffer* find_buffer(const void* address) {
  if (last_found != nullptr && is_within(*last_found, address)) return last_found;
  auto next = buffers.upper_bound(static_cast<const char*>(address));
  if (next == buffers.begin()) return nullptr;
  Buffer& candidate = std::prev(next)->second;
  if (!is_within(candidate, address)) return nullptr;
  return last_found = &candidate;
}

}  // namespace simt

using namespace simt;

extern "C" {

// A buffer that begins `offset_bytes` after an address as aligned as those of cudaMalloc. Null where memory is short.
char* simt_allocate(size_t bytes, unsigned element_bytes, size_t offset_bytes) {
  const size_t used = (bytes + offset_bytes + kBaseAlignment - 1) / kBaseAlignment * kBaseAlignment;
  const size_t accessible = (used + kPageBytes - 1) / kPageBytes * kPageBytes;
  const size_t total = accessible + 2 * kGuardBytes;
  void* mapping = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  Buffer buffer;
  buffer.mapping = static_cast<char*>(mapping);
  buffer.mapping_bytes = total;
  buffer.accessible_begin = buffer.mapping + kGuardBytes;
  buffer.accessible_end = buffer.accessible_begin + accessible;
  mprotect(buffer.accessible_begin, accessible, PROT_READ | PROT_WRITE);
  buffer.region.begin = buffer.accessible_end - used + offset_bytes;
  buffer.region.end = buffer.region.begin + bytes;
  buffer.region.cell_bytes = element_bytes;
  fill_margin(buffer.accessible_begin, buffer.region.begin);
  std::memset(buffer.region.begin, kFill, bytes);
  fill_margin(buffer.region.end, buffer.accessible_end);
  char* begin = buffer.region.begin;
  buffers[buffer.mapping] = std::move(buffer);
  return begin;
}

void simt_describe(const char* begin, const char* name, int is_written, int is_read_only) {
  Buffer* buffer = find_buffer(begin);
  if (name != nullptr) buffer->region.name = name;
  buffer->region.is_written = is_written != 0;
  buffer->region.is_read_only = is_read_only != 0;
}

// How many elements no kernel has written, and the first of them. Of use after checked builds only.
size_t simt_count_unwritten(const char* begin, size_t* first) {
  Region& region = find_buffer(begin)->region;
  if (region.is_written) return 0;
  const size_t elements = static_cast<size_t>(region.end - region.begin) / region.cell_bytes;
  size_t count = 0;
  for (size_t element = elements; element-- > 0;) {
    if (region.cells && region.cells[element].is_written) continue;
    ++count;
    *first = element;
  }
  return count;
}

void simt_free(const char* begin) {
  Buffer* buffer = find_buffer(begin);
  const Region& region = buffer->region;
  if (!is_margin(buffer->accessible_begin, region.begin)) {
    report("out of bounds", "something wrote before the beginning of " + region.name);
  }
  if (!is_margin(region.end, buffer->accessible_end)) {
    report("out of bounds", "something wrote behind the end of " + region.name);
  }
  munmap(buffer->mapping, buffer->mapping_bytes);
  last_found = nullptr;
  buffers.erase(buffer->mapping);
}

}  // extern "C"
