// The functions that g++ -fsanitize=thread calls before every access, served by the emulator in place of libtsan.
// Copies of a size that the compiler does not know arrive by the linker's --wrap.
#include <cstring>

#include "shadow.h"

using namespace simt;

#define SITE site_of(__builtin_return_address(0))

namespace {

void check(const void* address, unsigned bytes, bool writes, bool is_aligned, Site site) {
  if (is_in_kernel) check_access(address, {bytes, !writes, writes, is_aligned, AccessKind::kPlain, site});
}

void check_range(const void* address, size_t bytes, bool writes, Site site) {
  if (is_in_kernel) {
    check_access(address, {static_cast<unsigned>(bytes), !writes, writes, false, AccessKind::kPlain, site});
  }
}

}  // namespace

extern "C" {

#define SIMT_HOOKS(bytes)                                                                           \
  void __tsan_read##bytes(void* address) { check(address, bytes, false, true, SITE); }              \
  void __tsan_write##bytes(void* address) { check(address, bytes, true, true, SITE); }              \
  void __tsan_volatile_read##bytes(void* address) { check(address, bytes, false, true, SITE); }     \
  void __tsan_volatile_write##bytes(void* address) { check(address, bytes, true, true, SITE); }     \
  void __tsan_unaligned_read##bytes(void* address) { check(address, bytes, false, false, SITE); }   \
  void __tsan_unaligned_write##bytes(void* address) { check(address, bytes, true, false, SITE); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)

void __tsan_read_range(void* address, unsigned long bytes) { check_range(address, bytes, false, SITE); }
void __tsan_write_range(void* address, unsigned long bytes) { check_range(address, bytes, true, SITE); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}

void* __wrap_memcpy(void* destination, const void* source, size_t bytes) {
  check_range(source, bytes, false, SITE);
  check_range(destination, bytes, true, SITE);
  return std::memcpy(destination, source, bytes);
}
void* __wrap_memmove(void* destination, const void* source, size_t bytes) {
  check_range(source, bytes, false, SITE);
  check_range(destination, bytes, true, SITE);
  return std::memmove(destination, source, bytes);
}
void* __wrap_memset(void* destination, int value, size_t bytes) {
  check_range(destination, bytes, true, SITE);
  return std::memset(destination, value, bytes);
}

void simt_atomic_access(const void* address, unsigned bytes, const void* caller) {
  if (is_in_kernel) check_access(address, {bytes, true, true, true, AccessKind::kAtomic, site_of(caller)});
}

void simt_misaligned(const void* address, unsigned bytes) {
  if (!is_in_kernel) return;
  OutsideKernel outside;
  report("misaligned", "a vector of " + std::to_string(bytes) + " bytes at an address that is " +
                           std::to_string(reinterpret_cast<uintptr_t>(address) % bytes) + " bytes behind a multiple of " +
                           std::to_string(bytes), SITE);
  abandon_launch();
}

}  // extern "C"
