// Working memory of the calling thread, kept between calls so that pages are faulted in once.
#pragma once

#include <cstddef>

namespace whet {

// At least n floats, aligned to 64 bytes, valid until this thread's next call. Ends the process if memory is exhausted.
float* scratch(size_t n);

}  // namespace whet
