"""Makes the process keep memory that training frees, and use it again in the next step.

glibc returns large blocks to the system as soon as they are freed, and requests zeroed pages for the next ones: a page
fault for every 4 KiB, a tenth of a training step and more. And it never puts an aligned block, as torch asks for, into
the place of another one of its size: the heap grows to several times what is alive (native/heap.cpp). For another
allocator, set LD_PRELOAD.
"""

import ctypes
from functools import cache

from whet.config import environment
from whet.hardware import trim
from whet.hardware.memory import address_space_bytes, huge_pages, limit_bytes
from whet.kernels.library import library
from whet.log import logger

SWITCH = "WHET_KEEP_MEMORY"
"""Environment variable: 0 leaves the allocator unchanged."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
_LARGEST_BLOCK = 1 << 30
_STEP = 64 << 20
_MOST_RESERVED = 4 << 30
_NEVER = -1  # disables trimming, see the manual
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


@cache
def keep_freed_memory() -> bool:
    """Make this process's allocator keep and fill freed memory, in huge pages if the system provides them on request.

    This happens once, for the complete process; the log says so. Returns False, and changes nothing, for another
    allocator, for another system than Linux with glibc, and with WHET_KEEP_MEMORY=0.
    """
    if environment.value(SWITCH) == "0" or trim.why_not() is not None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = ((_MMAP_THRESHOLD, _LARGEST_BLOCK), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _STEP))
    if not all(libc.mallopt(name, value) for name, value in wanted):
        return False
    where = ", in huge pages" if _reserve_huge_pages(libc) else ""
    native = library()
    where += "" if native is not None and native.fill_gaps() else "; blocks of torch do not fill the gaps of others"
    logger.info("this process keeps the memory it frees for its next step%s (%s=0: it does not)", where, SWITCH)
    return True


def return_freed_memory() -> None:
    """Return to the system the freed memory that this process keeps; the next step takes new pages for it."""
    has_begun = keep_freed_memory.cache_info().currsize > 0
    if has_begun and keep_freed_memory():
        trim.trim()()


def _reserve_huge_pages(libc: ctypes.CDLL) -> bool:
    """Grow the heap by blocks that are freed at once, and request huge pages there; no page is touched."""
    if (given := huge_pages()) != "madvise":
        return given == "always"
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = _LARGEST_BLOCK - _STEP  # allocated by malloc on the heap, one block after the other
    room = min(limit_bytes() or 0, address_space_bytes() or _MOST_RESERVED * 4)  # what is reserved is mapped
    n_blocks = min(room // 4, _MOST_RESERVED) // size
    blocks = [block for block in (libc.malloc(size) for _ in range(n_blocks)) if block]
    advised = [_advise_huge_pages(libc, block, size) for block in blocks]
    for block in blocks:
        libc.free(block)
    return any(advised)


def _advise_huge_pages(libc: ctypes.CDLL, block: int, size: int) -> bool:
    first = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    return libc.madvise(first, (block + size - first) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE) == 0
