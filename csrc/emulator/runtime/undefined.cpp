// The functions that g++ -fsanitize=undefined calls where C++ gives no meaning, in place of libubsan.
//
// Source: the layouts are those of GCC's and LLVM's runtime, ubsan_handlers.h.
#include <cstring>
#include <string>

#include "state.h"

using namespace simt;

#define SITE site_of(__builtin_return_address(0))

namespace {

struct Location {  // the address of the call says more: it also has the lines that the code is inlined from
  const char* file;
  uint32_t line, column;
};

struct Type {
  uint16_t kind, information;
  char name[1];
};

struct Mismatch {
  Location location;
  const Type* type;
  unsigned char logarithm_of_alignment, kind;
};

struct Typed {  // overflows, invalid values
  Location location;
  const Type* type;
};

struct Indexed {
  Location location;
  const Type *array, *index;
};

void note(const char* kind, const std::string& text, Site site) {
  if (!is_in_kernel) return;
  OutsideKernel outside;
  report(kind, text, site);
  abandon_launch();
}

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(const Mismatch* data, uintptr_t address) {
  const uintptr_t alignment = uintptr_t{1} << data->logarithm_of_alignment;
  if (address != 0 && address % alignment != 0) {
    note("misaligned", std::string("a ") + data->type->name + " at an address that is " +
                           std::to_string(address % alignment) + " bytes behind a multiple of " +
                           std::to_string(alignment), SITE);
  } else {
    note("undefined", std::string("a null pointer to ") + data->type->name, SITE);
  }
}

void __ubsan_handle_out_of_bounds(const Indexed* data, intptr_t index) {
  note("out of bounds", "index " + std::to_string(index) + " of an array of type " + data->array->name,
       SITE);
}

#define SIMT_OVERFLOW(handler, text)                                                  \
  void __ubsan_handle_##handler(const Typed* data, uintptr_t, uintptr_t) {              \
    note("undefined", std::string(text) + " of type " + data->type->name, SITE); \
  }
SIMT_OVERFLOW(add_overflow, "overflow of an addition")
SIMT_OVERFLOW(sub_overflow, "overflow of a subtraction")
SIMT_OVERFLOW(mul_overflow, "overflow of a product")
SIMT_OVERFLOW(divrem_overflow, "division by zero or overflow of a quotient")
SIMT_OVERFLOW(negate_overflow, "overflow of a negation")
SIMT_OVERFLOW(shift_out_of_bounds, "shift by too much or of a negative number")

}  // extern "C"
