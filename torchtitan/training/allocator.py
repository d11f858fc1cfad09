"""The C allocator, for training on a CPU."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that is freed, for the next step, which asks for the same sizes again.

    By default each large tensor is mapped anew and returned at once, and every page of it costs a fault: about 5 % of
    a step's CPU time. The process then stays as large as its peak, as a GPU's caching allocator does; larger where
    FSDP gathers and frees, since glibc before 2.38 cannot use a freed aligned block again for one of the same size.

    Returns:
        Whether it is set; False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
