"""Keep freed memory in the process: a CPU run without page faults in every step."""

import ctypes

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Make glibc's allocator reuse large blocks instead of returning them to the kernel; for the rest of the process.

    A step allocates and frees the same tensors again and again. By default every block of more than a few MiB is mapped
    anew, and each of its pages faults on first use.
    The process keeps the memory of its largest step. Returns False where there is no glibc, and changes nothing there.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26))
    accepted = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(accepted)
