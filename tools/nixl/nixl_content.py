"""Memory with guard bytes, and the bytes that the tools put into it: the same as in tools/workload/content.cc."""

import mmap

import numpy as np

PAGE = 4096
MASK = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(words):
    """Of an array, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FACTORS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(FACTORS[1])
    words ^= words >> np.uint64(31)
    return words


def mix_number(number):
    return int(mix(np.array([number & MASK], dtype=np.uint64))[0])


def pattern(source, step, length, offset=0):
    """`length` bytes of the content of (source, step) from byte `offset` on."""
    key = mix_number(mix_number(source + WEYL) + step)
    skip = offset % 8
    words = np.arange(offset // 8, (offset + length + 7) // 8, dtype=np.uint64)
    words *= np.uint64(WEYL)
    words += np.uint64(key)
    return mix(words).view(np.uint8)[skip : skip + length]


def allocate(length, pages):
    """`length` bytes in "huge" or "small" pages, from a page boundary on: as tools/memory/host_memory.cc does."""
    memory = mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    except OSError:  # a kernel without huge pages
        pass
    return np.frombuffer(memory, dtype=np.uint8)[:length]


class Allocation:
    """`length` bytes from a page boundary on, with a guard before and behind them."""

    def __init__(self, length, pages):
        memory = allocate(length + 2 * PAGE, pages)
        self.guards = [memory[:PAGE], memory[PAGE + length :]]
        self.data = memory[PAGE : PAGE + length]
        self.address = self.data.ctypes.data
        self.length = length
        for number, guard in enumerate(self.guards):
            guard[:] = pattern(MASK, number + 1, PAGE)

    def damage(self):
        """Guard bytes that were written."""
        return sum(
            int(np.count_nonzero(guard != pattern(MASK, number + 1, PAGE))) for number, guard in enumerate(self.guards)
        )
