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

void* required(void* memory, size_t n_bytes) {
  if (!memory) {
    std::fprintf(stderr, "whet: no memory for %zu bytes of working space\n", n_bytes);
    std::abort();
  }
  return memory;
}

}  // namespace

float* scratch(size_t n) {
  if (n > arena.size) {
    std::free(arena.data);
    arena.size = (n + 15) / 16 * 16;
    const size_t n_bytes = arena.size * sizeof(float);
    arena.data = static_cast<float*>(required(std::aligned_alloc(64, n_bytes), n_bytes));
  }
  return arena.data;
}

void* claim(size_t n_bytes) { return required(std::malloc(n_bytes ? n_bytes : 1), n_bytes); }

}  // namespace whet
