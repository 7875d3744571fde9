"""fp8 with block scales, against torch's own cast and the formula, element by element."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weightbus.schemas.dtypes import DType
from weightbus.schemas.errors import ConversionError
from weightbus.writers.quantize import BlockFp8, quantize_fp8

_TORCH: dict[DType, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _by_formula(weight: torch.Tensor, how: BlockFp8) -> tuple[bytes, bytes]:
    """Block by block in torch, written from the format's description."""
    high, wide = how.block
    rows, cols = weight.shape
    quantized = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // high), -(-cols // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide].float()
            scale = block.abs().max().clamp(min=1e-10) / 448.0
            if how.ue8m0:
                scale = torch.tensor(2.0) ** torch.ceil(torch.log2(scale.double())).float()
            scales[i, j] = scale
            values = (block / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            quantized[i * high : (i + 1) * high, j * wide : (j + 1) * wide] = values
    return _bytes(quantized), _bytes(scales)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 50),
    high=st.integers(1, 17), wide=st.integers(1, 19),
    dtype=st.sampled_from(sorted(_TORCH)), ue8m0=st.booleans(), seed=st.integers(0, 10**6),
    exponent=st.integers(-20, 6),
)  # fmt: skip
def test_every_byte_is_that_of_the_formula(
    rows: int, cols: int, high: int, wide: int, dtype: DType, ue8m0: bool, seed: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, cols, generator=generator) * 2.0**exponent).to(_TORCH[dtype])
    how = BlockFp8((high, wide), ue8m0)
    found = quantize_fp8(_bytes(weight), dtype, (rows, cols), how)
    assert (found.weight, found.scales) == _by_formula(weight, how)


def test_a_block_of_zeros_stays_zero_and_has_a_finite_scale() -> None:
    weight = torch.zeros(256, 200)
    weight[130:, 140:] = 3.0
    found = quantize_fp8(_bytes(weight), "F32", (256, 200), BlockFp8())
    values = torch.frombuffer(bytearray(found.weight), dtype=torch.float8_e4m3fn).float()
    scales = np.frombuffer(found.scales, np.float32).reshape(2, 2)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    back = values.reshape(256, 200) * torch.from_numpy(
        scales.repeat(128, 0).repeat(128, 1)[:256, :200]
    )
    assert torch.equal(back, weight)


def test_leading_dims_are_matrices_of_their_own() -> None:
    weight = torch.randn(3, 150, 130, generator=torch.Generator().manual_seed(1))
    weight[1] *= 100
    how = BlockFp8()
    found = quantize_fp8(_bytes(weight), "F32", (3, 150, 130), how)
    singles = [quantize_fp8(_bytes(one), "F32", (150, 130), how) for one in weight]
    assert found.weight == b"".join(one.weight for one in singles)
    assert found.scales == b"".join(one.scales for one in singles)
    assert how.scale_shape((3, 150, 130)) == (3, 2, 2)
    assert len(found.scales) == 4 * 3 * 2 * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_weight_is_refused(bad: float) -> None:
    weight = torch.ones(300, 10)
    weight[299, 3] = bad
    with pytest.raises(ConversionError, match=r"NaN or Inf.*diverged"):
        quantize_fp8(_bytes(weight), "F32", (300, 10), BlockFp8())


def test_what_has_no_blocks_or_no_float_is_refused() -> None:
    with pytest.raises(ConversionError, match="shape"):
        quantize_fp8(bytes(8), "F32", (2,), BlockFp8())
    with pytest.raises(ConversionError, match="dtype I32"):
        quantize_fp8(bytes(16), "I32", (2, 2), BlockFp8())
