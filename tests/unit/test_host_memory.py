"""Unit tests for mpirpc._core.host_memory: every piece is plain memory; large ones ask for huge pages."""

import mmap

import pytest
import torch

from mpirpc._core import host_memory
from mpirpc._core.host_memory import HUGE_FROM


def piece(nbytes):
    return host_memory.in_huge_pages(torch.empty(nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_FROM - 1, HUGE_FROM, HUGE_FROM + 4097])
def test_piece_is_a_plain_tensor(nbytes):
    frame = piece(nbytes)
    assert (frame.dtype, frame.shape, frame.is_cpu) == (torch.uint8, (nbytes,), True)
    frame.fill_(7)
    assert int(frame.sum(dtype=torch.int64)) == 7 * nbytes


def test_only_whole_pages_inside_a_large_piece_are_advised(monkeypatch):
    advised = []
    monkeypatch.setattr(host_memory, "_madvise", lambda *arguments: advised.append(arguments))
    piece(HUGE_FROM - 1)
    assert advised == []
    frame = piece(HUGE_FROM + 5)
    [(start, length, advice)] = advised
    assert advice == mmap.MADV_HUGEPAGE
    assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
    assert frame.data_ptr() <= start
    assert start + length <= frame.data_ptr() + frame.numel()
    assert length > frame.numel() - 2 * mmap.PAGESIZE
