"""`attention_backend="varlen"`: PyTorch's own flash attention, where the package flash-attn lacks.

The seam: gpu.py adds it to `BACKENDS` (attention.py), with what it needs.
"""

from torch import Tensor

from nanoengine.step_inputs import StepInputs


def varlen_attention(query: Tensor, cache: Tensor, window: int | None, step: StepInputs) -> Tensor:
    """PyTorch's own build of these kernels, which takes block tables from torch 2.12 on.

    Arguments and result are those of `flash_attention`.
    """
    from torch.nn.attention.varlen import varlen_attn
    keys, values = cache
    # (keys to the left, keys to the right); a decode sees all keys anyway
    window_size = (window - 1, 0) if window else (-1, 0 if step.longest_query > 1 else -1)
    return varlen_attn(  # type: ignore
        query, keys, values, step.query_starts, step.key_starts, step.longest_query,
        step.longest_keys, enable_gqa=True, seqused_k=step.lengths, window_size=window_size,
        block_table=step.block_tables)
