// One access of a kernel, to be checked before it happens.
#pragma once

#include "memory.h"

namespace simt {

struct Request {
  unsigned bytes;
  bool reads, writes;
  bool is_aligned;  // must be, to its size
  AccessKind kind;
  Site site;
};

// Does nothing outside kernels. Ends the launch where the access itself would be a fault.
void check_access(const void* address, const Request& request);

}  // namespace simt
