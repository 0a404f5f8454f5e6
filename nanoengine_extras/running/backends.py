"""More attention backends: more rows for the table `BACKENDS`.

    numba     on a CPU: the kernel of nanoengine_extras.cpu, which takes the place of the model's
              own attention
    triton    the kernel of nanoengine_extras.gpu, for any GPU and dtype
    varlen    on a GPU: PyTorch's own build of flash-attn's kernels
"""

from typing import Any

import torch
from torch import Tensor

from nanoengine.attention import Backend
from nanoengine.features import kernels
from nanoengine.step_inputs import StepInputs


def has_numba(device: str, dtype: torch.dtype) -> bool:
    """Whether nanoengine_extras.cpu can replace the model's attention with its kernel."""
    return device == "cpu" and dtype != torch.half and bool(kernels(device))


def triton_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """Takes and returns the same as `gather_attention`. The host reads no tensor values."""
    return kernels("cuda").paged_attention(query, cache, window, step)


def has_triton(device: str, dtype: torch.dtype) -> bool:
    """Whether nanoengine_extras.gpu is installed."""
    return device == "cuda" and bool(kernels(device))


def varlen_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """Takes and returns the same as `gather_attention`."""
    from torch.nn.attention.varlen import varlen_attn
    keys, values = cache
    # (keys to the left, keys to the right); a decode sees all keys anyway
    window_size = (window - 1, 0) if window else (-1, 0 if step.longest_query > 1 else -1)
    return varlen_attn(  # type: ignore
        query, keys, values, step.query_starts, step.key_starts, step.longest_query,
        step.longest_keys, enable_gqa=True, seqused_k=step.lengths, window_size=window_size,
        block_table=step.block_tables, **splits_of(query, keys, window, step))


def splits_of(query: Tensor, keys: Tensor, window: int | None, step: StepInputs) -> dict[str, Any]:
    """Returns the option that keeps the keys of a sequence in one piece, where that is necessary.

    torch 2.13 splits the keys of several sequences, and then loses all results but the first,
    except where the heads of a group share a decode (pytorch/pytorch#194167). 2.12 has no such
    option.
    """
    is_grouped = step.longest_query == 1 and not window and query.shape[1] > keys.shape[2]
    return {} if is_grouped or torch.__version__ < "2.13" else {"num_splits": 1}


def has_varlen(device: str, dtype: torch.dtype) -> bool:
    """Whether it works: it accepts block tables from torch 2.12 on."""
    return device == "cuda" and dtype != torch.float32 and torch.__version__ >= "2.12"


PARTS = {"backends": {
    "numba": Backend(None, has_numba, rank=3),
    "triton": Backend(triton_attention, has_triton, 3, has_graphs=True),
    "varlen": Backend(varlen_attention, has_varlen, 2, block_multiple=256, has_graphs=True)}}
