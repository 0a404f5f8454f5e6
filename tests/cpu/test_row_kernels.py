"""The CPU's kernels for rows, against the plain functions that they take the place of."""

import pytest
import torch

from nanoengine_cpu import functions as model
from nanoengine_cpu import rms_norm, swiglu

SIZES = [1, 7, 16, 40, 96, 1000, 1024]
DTYPES = [torch.float32, torch.bfloat16]


def plain(monkeypatch, function, *arguments):
    """What PyTorch's operators give."""
    with monkeypatch.context() as patch:
        patch.setattr(model, "has_kernel", lambda x: False)
        return function(*arguments)


def check_close(found, expected):
    """At most one unit in the last place in bfloat16, and a relative error of 6e-6 in float32."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 6e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_rms_norm(monkeypatch, num_rows, size, dtype):
    torch.manual_seed(size)
    x = (torch.randn(num_rows, size) * 10 ** torch.randn(num_rows, 1)).to(dtype)
    weight = torch.randn(size).to(dtype)
    before = x.clone()
    found = rms_norm(x, weight, 1e-6)
    check_close(found, plain(monkeypatch, rms_norm, x, weight, 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_swiglu(monkeypatch, num_rows, size, dtype):
    torch.manual_seed(size)
    gate_up = (torch.randn(num_rows, 2 * size) * 10).to(dtype)
    before = gate_up.clone()
    found = swiglu(gate_up)
    check_close(found, plain(monkeypatch, swiglu, gate_up))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_from_end_to_end(monkeypatch, dtype):
    """All gates from -88 to 88, where e^x is a number of float32; and what lies beyond."""
    gates = torch.linspace(-88, 88, 20_001).to(dtype)
    gate_up = torch.cat([gates, torch.ones_like(gates)])[None]
    check_close(swiglu(gate_up), plain(monkeypatch, swiglu, gate_up))
    far = torch.tensor([[-1e38, 1e4, 1e30, torch.nan, 1, 1, 1, 1]]).to(dtype)
    assert swiglu(far)[0, :3].tolist() == pytest.approx([0, 1e4, 1e30], rel=1e-2, abs=1e-30)
    assert swiglu(far)[0, 3].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 1000).to(dtype)
    weight = torch.randn(1000).to(dtype)
    for function in (lambda rows: rms_norm(rows, weight, 1e-6), swiglu):
        together = function(x)
        for rows in (slice(0, 1), slice(5, 7), slice(40, 64)):
            assert torch.equal(function(x[rows]), together[rows])


def test_nan_stays_in_its_row():
    x = torch.randn(3, 32)
    x[1, 5] = torch.nan
    for found in (rms_norm(x, torch.ones(32), 1e-6), swiglu(x)):
        assert found.isnan().any(dim=1).tolist() == [False, True, False]


def test_rows_that_no_kernel_takes():
    """Strided ones, heads, and float16: PyTorch's operators compute them."""
    x = torch.randn(6, 32)
    assert model.has_kernel(x)
    for rows in (x[:, :16], x.view(6, 2, 16), x.half()):
        assert not model.has_kernel(rows)
        weight = torch.ones(rows.shape[-1], dtype=rows.dtype)
        expected = torch.nn.functional.rms_norm(rows.float(), rows.shape[-1:], eps=1e-6)
        torch.testing.assert_close(rms_norm(rows, weight, 1e-6).float(), expected, rtol=1e-3,
                                   atol=1e-3)
