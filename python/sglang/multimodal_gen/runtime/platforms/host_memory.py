"""Host memory of an exact size that the device can read at full speed.

Not torch's pinned allocator: it rounds up to powers of two, which costs a third of the memory for
FLUX.1's blocks (680 MB become 1 GiB), and a container's limit counts every byte.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process


class HostMemory:
    """One stretch of host memory, ``nbytes`` long, as a flat uint8 tensor ``data``.

    Pages come with the first write, huge ones where the system has them. Lives as long as any view
    of ``data``; pinning ends with this object.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, 1))
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(advice)
        self.data: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]
        self.pinned = False

    def pin(self) -> bool:
        """Lock the pages and let the device read them; False, with a warning, if it may not.

        Best after the memory was written: faulting pages in is the slow part.
        """
        if self.pinned or not self.nbytes:
            return self.pinned
        cudart: Any = torch.cuda.cudart()
        address = self.data.data_ptr()
        status = int(cudart.cudaHostRegister(address, self.nbytes, _PORTABLE))
        if status != 0:
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")  # the next launch would report that error as its own
            warning = f"cudaHostRegister of {self.nbytes} bytes failed with error {status}"
            logger.warning("%s: copies from host memory will be several times slower", warning)
            return False
        weakref.finalize(self, _unregister, address, self._map)
        self.pinned = True
        return True


def _unregister(address: int, _kept_until_now: mmap.mmap) -> None:
    cudart: Any = torch.cuda.cudart()
    with suppress(RuntimeError):  # when the interpreter ends, the driver may be gone
        cudart.cudaHostUnregister(address)
