#include "scratch.h"

#include <cstdio>
#include <cstdlib>

namespace whet {
namespace {

struct Arena {
  float* data = nullptr;
  size_t size = 0;
  ~Arena() { std::free(data); }
};

thread_local Arena arena;

}  // namespace

float* scratch(size_t n) {
  if (n > arena.size) {
    std::free(arena.data);
    arena.size = (n + 15) / 16 * 16;
    arena.data = static_cast<float*>(std::aligned_alloc(64, arena.size * sizeof(float)));
    if (!arena.data) {
      std::fprintf(stderr, "whet: no memory for %zu bytes of working space\n", arena.size * sizeof(float));
      std::abort();
    }
  }
  return arena.data;
}

}  // namespace whet
