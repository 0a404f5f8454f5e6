"""The kernel of RMSNorm, against PyTorch's, and SwiGLU."""

import pytest
import torch
import torch.nn.functional as F

from nanoengine_cpu import rms_norm, swiglu

DTYPES = [torch.float32, torch.bfloat16]


def plain(x, weight):
    return F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 40, 96, 1000, 1024])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_rms_norm(num_rows, size, dtype):
    """At most one unit in the last place in bfloat16, and a relative error of 6e-6 in float32."""
    torch.manual_seed(size)
    x = (torch.randn(num_rows, size) * 10 ** torch.randn(num_rows, 1)).to(dtype)
    weight = torch.randn(size).to(dtype)
    before = x.clone()
    tolerance = 2**-7 if dtype == torch.bfloat16 else 6e-6
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6), plain(x, weight), rtol=tolerance, atol=1e-30)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 1000).to(dtype)
    weight = torch.randn(1000).to(dtype)
    together = rms_norm(x, weight, 1e-6)
    for rows in (slice(0, 1), slice(5, 7), slice(40, 64)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-6), together[rows])


def test_nan_stays_in_its_row():
    x = torch.randn(3, 32)
    x[1, 5] = torch.nan
    found = rms_norm(x, torch.ones(32), 1e-6)
    assert found.isnan().any(dim=1).tolist() == [False, True, False]


def test_rows_that_no_kernel_takes():
    """Strided ones, heads, and float16: PyTorch's operators compute them."""
    x = torch.randn(6, 32)
    for rows in (x[:, :16], x.view(6, 2, 16), x.half()):
        weight = torch.ones(rows.shape[-1], dtype=rows.dtype)
        assert torch.equal(rms_norm(rows, weight, 1e-6), plain(rows, weight))


def test_swiglu():
    gate_up = torch.randn(5, 14)
    gate, up = gate_up[:, :7], gate_up[:, 7:]
    torch.testing.assert_close(swiglu(gate_up), gate / (1 + (-gate).exp()) * up)
