"""The counterpart of flash-attn for a CPU: tensors in, tensors out. It needs no engine.

    optimize(model)         fast products and attention, and many layers of a decoder in one call
    empty_cache(…)          memory for K and V in blocks, as `paged_attention` reads it
    paged_attention(…)      the attention kernel, as a function of tensors
"""

from nanoengine_extras.cpu.attention import empty_cache, paged_attention
from nanoengine_extras.cpu.memory import check_process, end_threads, has_bfloat16
from nanoengine_extras.cpu.modules import knows_attention, optimize
from nanoengine_extras.cpu.sampling import first_max, truncate

__all__ = ["check_process", "empty_cache", "end_threads", "first_max", "has_bfloat16",
           "knows_attention", "optimize", "paged_attention", "truncate"]
