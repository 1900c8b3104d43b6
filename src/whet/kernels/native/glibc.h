// Binds the functions of libm to versions that glibc 2.28 has, the oldest that torch's own wheels run on. A newer glibc
// would otherwise bind them to its newest version. The old and the new `log` differ only in errno, which is not read here.
#pragma once

#include <cmath>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17");
#endif
