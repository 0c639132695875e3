// Copies of memory: asynchronous ones inside kernels, and those of launchers.
#include <cstring>
#include <string>

#include "shadow.h"

using namespace simt;

namespace {

void check_words(const void* address, unsigned bytes, bool writes, AccessKind kind, Site site) {
  check_access(address, {bytes, !writes, writes, false, kind, site});
}

// The buffer that a launcher's call writes or reads as a whole, or null.
Region* region_of(const char* call, const void* address, size_t bytes) {
  Buffer* buffer = find_buffer(address);
  if (buffer == nullptr) return nullptr;
  Region& region = buffer->region;
  const char* begin = static_cast<const char*>(address);
  if (begin >= region.begin && begin + bytes <= region.end) return &region;
  report("out of bounds", std::string(call) + " of " + std::to_string(bytes) + " bytes at " + region.describe(begin));
  return nullptr;
}

void mark_written(Region& region, const void* address, size_t bytes) {
  if (region.is_read_only) report("read-only", "a launcher writes to " + region.name + ", an input");
  if (!region.cells) region.allocate_cells();
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - region.begin);
  for (size_t cell = offset / region.cell_bytes; cell * region.cell_bytes < offset + bytes; ++cell) {
    region.cells[cell].is_written = true;
  }
}

}  // namespace

extern "C" {

// From here on the destination holds anything until the wait, so it counts as written and as uninitialised.
void simt_copy_asynchronously(void* destination, const void* source, unsigned bytes) {
  const Site site = site_of(__builtin_return_address(0));
  if ((reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source)) % bytes != 0) {
    simt_misaligned(reinterpret_cast<uintptr_t>(destination) % bytes != 0 ? destination : source, bytes);
  }
  check_words(source, bytes, false, AccessKind::kPlain, site);
  check_words(destination, bytes, true, AccessKind::kPending, site);
  OutsideKernel outside;
  running->copies.push_back(
      {static_cast<char*>(destination), static_cast<const char*>(source), bytes, running->copy_group, site});
}

void simt_commit_copies() { ++running->copy_group; }

void simt_wait_for_copies(int groups_left) {
  auto& copies = running->copies;
  std::size_t done = 0;
  for (; done < copies.size() && copies[done].group < running->copy_group - groups_left; ++done) {
    const AsynchronousCopy& copy = copies[done];
    check_words(copy.source, copy.bytes, false, AccessKind::kPlain, copy.site);
    check_words(copy.destination, copy.bytes, true, AccessKind::kPlain, copy.site);
    std::memcpy(copy.destination, copy.source, copy.bytes);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

int simt_set_memory(void* address, int value, size_t bytes) {
  Region* region = region_of("cudaMemsetAsync", address, bytes);
  if (region == nullptr) return 1;  // cudaErrorInvalidValue
  mark_written(*region, address, bytes);
  std::memset(address, value, bytes);
  return 0;
}

int simt_copy_memory(void* destination, const void* source, size_t bytes) {
  Region* region = region_of("cudaMemcpyAsync", destination, bytes);
  if (region == nullptr) return 1;
  mark_written(*region, destination, bytes);
  std::memcpy(destination, source, bytes);
  return 0;
}

}  // extern "C"
