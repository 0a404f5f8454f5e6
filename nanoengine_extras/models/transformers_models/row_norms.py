"""RMSNorm as one kernel for a CPU, in place of about ten operators of PyTorch.

The engine's own models do not need it: `nanoengine_extras.cpu` fuses their norms into the products
that follow. The sums of a row always have the same order, whatever other rows there are.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanoengine.model import RMSNorm
from nanoengine_extras.cpu.compiling import bits_of_number, compile_kernel, run_call, take_tasks
from nanoengine_extras.cpu.products import norm_row
from nanoengine_extras.cpu.vectors import DTYPES, array_at, numbers_at


@functools.cache
def make_kernel(dtype: torch.dtype, weight_dtype: torch.dtype) -> Callable:
    """kernel(weight, eps_bits, size, x, rows)

    x becomes RMSNorm of x, (rows, size) of `dtype`. weight: (size,) of `weight_dtype`
    """
    uint, weight_uint = DTYPES[dtype], DTYPES[weight_dtype]

    def norm(phase, threads, arguments_at):
        weight_at, eps_bits, size, x_at, rows = numbers_at(arguments_at, 5)
        x = array_at(x_at, (rows, size), uint)
        # a few thousand numbers at a time
        for r in take_tasks(rows, 1 + 4096 // size, arguments_at):
            norm_row(x[r], array_at(weight_at, size, weight_uint), eps_bits)

    return compile_kernel(norm)


class RowNorm(RMSNorm):
    """Takes the place of a norm. It keeps no gradients.

    weight: (size,), in bfloat16 or float32; it need not have the dtype of the rows.
    """

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = norm.weight
        self.eps_bits = bits_of_number(norm.eps or 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """From (…, size) to (…, size), in a dtype of `DTYPES`."""
        size = x.shape[-1]
        out = x.clone(memory_format=torch.contiguous_format)
        kernel = make_kernel(x.dtype, self.weight.dtype)
        run_call(kernel(
            self.weight.data_ptr(), self.eps_bits, size, out.data_ptr(), x.numel() // size))
        return out
