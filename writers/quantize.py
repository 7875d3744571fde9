"""Quantized outputs: a whole tensor in, its quantized bytes and its scales out.

Block fp8 (DeepSeek-V3, transformers' FineGrainedFP8): blocks of `block[0]` x `block[1]` elements,
one float32 scale each, `weight = e4m3 * scale`:

    scale = max(|block|, 1e-10) / 448                    448 is e4m3's largest value
    scale = 2 ** ceil(log2(scale))                       when the format of scales is ue8m0
    e4m3  = round(block / scale), ties to even

The last block of a row or column may be smaller. The floor keeps a block of zeros from dividing by
zero. Scales are stored as they are, [ceil(rows/block), ceil(cols/block)] float32: a serving engine
packs them for its kernels itself. Per-tensor fp8 is one block that is the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.dtypes import DType
from ..schemas.errors import ConversionError, MissingDependencyError

E4M3_MAX = 448.0
ABSMAX_FLOOR = 1e-10
_ROW_BLOCKS = 8
"""Rows of blocks that are computed at a time: bounds the float32 copy."""


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """e4m3 with a scale for each block. `ue8m0`: scales are powers of two."""

    block: tuple[int, int] = (128, 128)
    ue8m0: bool = False

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight [..., rows, cols]."""
        rows, cols = shape[-2:]
        return (*shape[:-2], -(-rows // self.block[0]), -(-cols // self.block[1]))


@dataclass(frozen=True, slots=True)
class Quantized:
    """The bytes of the quantized weight and of its scales (float32), row-major."""

    weight: bytes
    scales: bytes


def _ml_dtypes() -> Any:
    try:
        import ml_dtypes  # noqa: PLC0415 - only who quantizes needs it
    except ImportError as error:
        raise MissingDependencyError(
            "quantized outputs need ml_dtypes", next_step="pip install 'weightbus[quantize]'"
        ) from error
    return ml_dtypes


def values_of(data: bytes | bytearray | memoryview, dtype: DType) -> Any:
    """A flat array over a tensor's bytes, without a copy.

    Raises:
        ConversionError: a dtype from which weights are not quantized.
    """
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16)
    if dtype == "BF16":
        return np.frombuffer(data, _ml_dtypes().bfloat16)
    raise ConversionError(
        f"a weight of dtype {dtype} cannot be quantized to fp8",
        next_step="publish bf16, fp16 or fp32 weights",
    )


def quantize_fp8(
    data: bytes | bytearray | memoryview, dtype: DType, shape: tuple[int, ...], how: BlockFp8
) -> Quantized:
    """Quantize one weight.

    Args:
        data: its bytes, row-major.
        dtype: F32, BF16 or F16.
        shape: [..., rows, cols]; leading dims (fused experts) are matrices of their own.
        how: block size and format of the scales.

    Raises:
        ConversionError: a dtype or shape that cannot be quantized, or NaN or Inf in the weight:
            its scale would spoil the whole block in silence.
        MissingDependencyError: ml_dtypes is not installed.
    """
    if len(shape) < 2:
        raise ConversionError(f"a tensor of shape {shape} has no blocks to quantize")
    matrices = values_of(data, dtype).reshape(-1, *shape[-2:])
    weights, scales = zip(*(_matrix(matrix, how) for matrix in matrices), strict=True)
    return Quantized(b"".join(weights), b"".join(scales))


def _matrix(matrix: Any, how: BlockFp8) -> tuple[bytes, bytes]:
    high, wide = how.block
    rows, cols = matrix.shape
    e4m3 = _ml_dtypes().float8_e4m3fn
    scales = np.empty((-(-rows // high), -(-cols // wide)), np.float32)
    weight = np.empty((rows, cols), np.uint8)
    for top in range(0, rows, high * _ROW_BLOCKS):
        part = matrix[top : top + high * _ROW_BLOCKS].astype(np.float32)
        scale = _scales(part, how)
        scales[top // high : top // high + len(scale)] = scale
        spread = scale.repeat(high, 0)[: len(part)].repeat(wide, 1)[:, :cols]
        rounded = np.clip(part / spread, -E4M3_MAX, E4M3_MAX).astype(e4m3)
        weight[top : top + len(part)] = rounded.view(np.uint8)
    return weight.tobytes(), scales.tobytes()


def _scales(part: Any, how: BlockFp8) -> Any:
    """float32 scales of some rows of blocks."""
    high, wide = how.block
    by_rows = np.maximum.reduceat(np.abs(part), np.arange(0, part.shape[0], high), axis=0)
    largest = np.maximum.reduceat(by_rows, np.arange(0, part.shape[1], wide), axis=1)
    if not np.isfinite(largest).all():
        row, col = np.argwhere(~np.isfinite(largest))[0]
        raise ConversionError(
            "a weight holds NaN or Inf",
            where={"block_row": int(row), "block_col": int(col)},
            next_step="the training run has diverged; do not serve this version",
        )
    scale = np.maximum(largest, np.float32(ABSMAX_FLOOR)) / np.float32(E4M3_MAX)
    if how.ue8m0:
        # frexp: scale = mantissa * 2**exponent, 0.5 <= mantissa < 1; exact powers stay.
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == np.float32(0.5)))
    return scale.astype(np.float32)
