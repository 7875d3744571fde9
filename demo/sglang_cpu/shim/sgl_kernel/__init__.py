"""Stand-in for sgl_kernel, whose CPU build needs AMX: the one operation that SGLang calls."""

import sys

import torch
from absent_names import stand_in

__version__ = "0.0.0+standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
) -> None:
    """Write each request's new cache places into its row of the pool, in place.

    Args:
        req_pool_indices: [n] rows of `req_to_token`.
        req_to_token: [pool, length] cache place of each token.
        start_offset: [n] first column to write in each row.
        end_offset: [n] column after the last one.
        out_cache_loc: [sum(end - start)] places, row after row.
        pool_len: the pool's row length, which the tensor knows itself.
    """
    del pool_len
    rows = req_pool_indices.tolist()
    at = 0
    for row, start, end in zip(rows, start_offset.tolist(), end_offset.tolist(), strict=True):
        places = out_cache_loc[at : at + end - start]
        req_to_token[row, start:end] = places.to(req_to_token.dtype)
        at += end - start


stand_in(sys.modules[__name__])
