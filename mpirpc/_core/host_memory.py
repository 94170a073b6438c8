"""Memory for what arrives in large pieces.

The C library maps pieces from 32 MiB on anew each time, and the kernel then clears them page by page as they
are first written: four fifths of what receiving 64 MiB costs. Asked for huge pages it clears 2 MiB at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

HUGE_FROM = 32 * 1024 * 1024
"""Size in bytes from which huge pages are asked for; smaller pieces are reused by the C library."""


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for a large contiguous tensor in fresh host memory; return it."""
    if tensor.nbytes >= HUGE_FROM and _madvise is not None:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, length, mmap.MADV_HUGEPAGE)  # only advice: if it is refused, nothing is lost
    return tensor


_madvise = None
if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
