"""Products of one to eight rows: a decode of few sequences.

    few_rows_linear(x, weight)                    x @ weight.T
    few_rows_linear(x, weight, norm=…, delta=…)   after a residual sum and its RMSNorm
    few_rows_linear(x, weight, is_gated=True)     before SwiGLU

Such a product reads each weight once and hardly computes, so it should take as long as the memory
takes to send the weights. A program computes a few columns of the result, for all rows. It asks for
the weights that it needs next before it uses those that have come; most programs of a matrix run at
the same time, so that much of it is always on its way. A program does not share its sums with
others, so there is nothing to join.

The norm needs a sum over a whole row, which each program computes again: a row is small beside
the weights, and stays in the GPU's caches.

Sums are float32. Numbers are rounded where PyTorch's operators would round them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kernel is used for at most so many rows, and weights of at most so many bytes. It has not been
# timed on a GPU, but cuBLAS has, on an H200 that can read at 4.2 TB/s: it reads the layers of
# Qwen3-0.6B at 1.1 TB/s, in the same time for 1 and for 256 rows, and the 311 MB of its head at
# 3.4 TB/s or more. Nothing is known of sizes in between, so only products of up to five times the
# size of those layers' are taken. tests/gpu/figures.py times both.
MOST_ROWS = 8
MOST_BYTES = 2**26

# A program computes so many columns of the product; with more, 8 rows would spill registers.
COLUMNS = 4
# It reads so many numbers of a row at once, 16 bytes for each of its 4 * 32 threads. This is the
# same for all numbers of rows: so a row's sums have the same order and bits, whatever other rows
# there are.
BLOCK = 1024
WARPS = 4


@triton.jit
def sum_of(x, delta, places, is_used):
    """Returns x + delta, rounded as the residual stream is."""
    numbers = tl.load(x + places, is_used, 0.0).to(tl.float32)
    if delta is not None:
        numbers += tl.load(delta + places, is_used, 0.0).to(tl.float32)
        numbers = numbers.to(x.dtype.element_ty).to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(x, delta, norm, total, weight, bias, out, num_rows, size, num_out, eps,
                    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                    BLOCK: tl.constexpr):
    """A program computes COLUMNS columns of the product, for all rows.

    norm: None for no norm; total is written only with a delta
    num_out: the columns of the result
    PARTS: 2 if the weight has num_out rows of a gate, and then as many of up; else 1
    """
    dtype: tl.constexpr = x.dtype.element_ty
    # tiles are (rows, columns of the product, numbers of a row)
    rows = tl.arange(0, ROWS)[:, None, None]
    places = tl.arange(0, BLOCK)[None, None, :]
    is_row = rows < num_rows
    # gate and up of a column of the result are side by side
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sources = columns // PARTS + columns % PARTS * num_out
    is_column = columns < num_out * PARTS
    is_weight = is_column[None, :, None]

    # 1. The first weights are on their way while the norm is computed.
    weights = weight + sources.to(tl.int64)[None, :, None] * size + places
    tile = tl.load(weights, is_weight & (places < size), 0.0)

    # 2. The scale of each row's norm.
    if norm is not None:
        squares = tl.zeros([ROWS, 1], tl.float32)
        for begin in range(0, size, BLOCK):
            is_used = is_row & (begin + places < size)
            numbers = sum_of(x, delta, rows * size + begin + places, is_used)
            squares += tl.sum(numbers * numbers, 2)
        scale = tl.rsqrt(squares / size + eps)[:, :, None]

    # 3. The product. The first program also writes the residual sum.
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, size, BLOCK):
        used = tile.to(tl.float32)
        tile = tl.load(weights + begin + BLOCK, is_weight & (begin + BLOCK + places < size), 0.0)
        is_used = is_row & (begin + places < size)
        numbers = sum_of(x, delta, rows * size + begin + places, is_used)
        if delta is not None:
            if tl.program_id(0) == 0:
                tl.store(total + rows * size + begin + places, numbers, is_used)
        if norm is not None:
            of_norm = tl.load(norm + begin + places, begin + places < size, 0.0).to(tl.float32)
            numbers = (numbers * scale * of_norm).to(dtype).to(tl.float32)
        sums += tl.sum(numbers * used, 2)
    if bias is not None:
        sums += tl.load(bias + sources, is_column, 0.0).to(tl.float32)[None, :]

    # 4. SwiGLU.
    if PARTS == 2:
        gate, up = tl.split(sums.to(dtype).to(tl.float32).reshape(ROWS, COLUMNS // 2, 2))
        sums = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    rows = tl.arange(0, ROWS)[:, None]
    results = tl.program_id(0) * (COLUMNS // PARTS) + tl.arange(0, COLUMNS // PARTS)[None, :]
    tl.store(out + rows * num_out + results, sums, (rows < num_rows) & (results < num_out))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None,
                    norm: Tensor | None = None, eps: float = 0.0, delta: Tensor | None = None,
                    is_gated: bool = False) -> tuple[Tensor, Tensor]:
    """Returns x + delta, and what a linear layer makes of it: (…, size) and (…, columns).

    x, delta: (…, size), 1 to 8 rows; without delta, the first result is x
    weight, bias: (columns, size) and (columns,); with `is_gated`, twice as many: gate, then up
    norm: (size,), the weights of an RMSNorm that comes first, or None
    is_gated: the result is SiLU(gate) * up
    """
    x = x.contiguous()
    size = x.shape[-1]
    num_rows = x.numel() // size
    rows = triton.next_power_of_2(num_rows)
    parts = 1 + is_gated
    columns = len(weight) // parts
    total = x if delta is None else torch.empty_like(x)
    out = x.new_empty(*x.shape[:-1], columns)
    few_rows_kernel[(triton.cdiv(len(weight), COLUMNS),)](
        x, None if delta is None else delta.contiguous(), norm, total, weight.contiguous(), bias,
        out, num_rows, size, columns, eps, parts, rows, COLUMNS, BLOCK, num_warps=WARPS,
        enable_fp_fusion=True)
    return total, out


def is_for_few_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows_linear` takes the place of PyTorch's product: (…, size) by (columns, size).

    It depends on shapes and types alone, so a CUDA graph keeps the choice.
    """
    fits = x.shape[-1:] == weight.shape[1:] and x.dtype == weight.dtype
    return (fits and x.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
            and 0 < x.numel() <= MOST_ROWS * x.shape[-1] and weight.nbytes <= MOST_BYTES)
