"""Tensors that lie one after another in memory, seen as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def end_to_end(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view of all the tensors along their first dimension, or None where they lie otherwise.

    They must share a storage, dtype and strides, and each begin where the one before it ends.
    """
    first, address = tensors[0], tensors[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != address
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.stride() != first.stride()
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
        ):
            return None
        address += tensor.shape[0] * tensor.stride(0) * tensor.element_size()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
