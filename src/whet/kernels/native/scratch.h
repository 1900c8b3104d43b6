// Working memory of operators. The process ends with a message if memory is exhausted.
#pragma once

#include <cstddef>

namespace whet {

// At least n floats, aligned to 64 bytes, valid until this thread's next call: kept, so that pages are faulted in once.
float* scratch(size_t n);

// As std::malloc, and as that for std::free; never null.
void* claim(size_t n_bytes);

}  // namespace whet
