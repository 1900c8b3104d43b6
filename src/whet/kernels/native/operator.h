// An operator is declared where it is defined, once: the structure of its arguments, and its function.
//
//   WHET_ARGUMENTS(Dropout,
//     int64_t rows, width;
//     const void* x;
//     void* y;
//   )
//   WHET_OPERATOR(dropout, Dropout) { ... a.rows ... }
//
// The library holds the text of the structure, from which Python packs its arguments (kernels/library.py). It has
// numbers, pointers, arrays of pointers and other such structures; a declaration has one type and ends with a semicolon.
//
// Activations are fp32 or bf16 (`dtype`), contiguous, rows of `width`; parameters, their gradients and statistics are
// fp32. A null pointer means "not wanted" where the comment says so. All gradients are written, none accumulated.
#pragma once

#include <cstddef>
#include <cstdint>

#define WHET_EXPORT __attribute__((visibility("default")))
// In each file that includes the header, and one for all of them in the library.
#define WHET_EXPORT_ONCE __attribute__((visibility("default"), weak))

#define WHET_JOIN_(isa, name) whet_##isa##_##name
#define WHET_JOIN(isa, name) WHET_JOIN_(isa, name)

namespace whet {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// The text of a structure's members, and its size.
struct Fields {
  const char* text;
  size_t size;
};

}  // namespace whet

#define WHET_ARGUMENTS(Name, ...)                                                  \
  struct Name {                                                                    \
    __VA_ARGS__                                                                    \
  };                                                                               \
  extern "C" {                                                                     \
  extern WHET_EXPORT_ONCE const whet::Fields whet_fields_##Name;                   \
  const whet::Fields whet_fields_##Name = {#__VA_ARGS__, sizeof(Name)};            \
  }

#define WHET_OPERATOR(name, Args)                                                  \
  static void name(const Args& a);                                                 \
  extern "C" {                                                                     \
  extern WHET_EXPORT_ONCE const char whet_arguments_of_##name[];                   \
  const char whet_arguments_of_##name[] = #Args;                                   \
  WHET_EXPORT void WHET_JOIN(WHET_ISA, name)(const void* args) { name(*static_cast<const Args*>(args)); } \
  }                                                                                \
  static void name(const Args& a)

#ifdef WHET_ISA
namespace whet {
namespace WHET_ISA {

// A (tokens, heads, head_width) view; strides in elements, the last dimension contiguous.
WHET_ARGUMENTS(View,
  void* data;
  int64_t token_stride, head_stride;
)

}  // namespace WHET_ISA
}  // namespace whet
#endif
