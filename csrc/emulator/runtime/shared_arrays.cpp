// The `__shared__` arrays of kernels. They are static variables of their library, so its symbol table says where they are.
#include <cstring>
#include <map>
#include <string>

#include "memory.h"

namespace simt {
namespace {

std::map<const char*, Region> arrays;  // by where they begin, of all libraries

}  // namespace

Region* find_shared_array(const char* address) {
  auto next = arrays.upper_bound(address);
  if (next == arrays.begin()) return nullptr;
  Region& array = std::prev(next)->second;
  return address < array.end ? &array : nullptr;
}

void forget_shared_memory() {
  std::memset(dynamic_shared, kFill, launch.shared_bytes);
  for (auto next = arrays.lower_bound(image.writable_begin); next != arrays.end(); ++next) {
    Region& array = next->second;
    if (array.begin >= image.writable_end) break;
    std::memset(array.begin, kFill, static_cast<size_t>(array.end - array.begin));
  }
}

}  // namespace simt

extern "C" void simt_add_shared_array(char* begin, size_t bytes, const char* name) {
  simt::Region& array = simt::arrays[begin];
  array.begin = begin;
  array.end = begin + bytes;
  array.name = std::string("shared ") + name;
  array.is_shared = true;
}
