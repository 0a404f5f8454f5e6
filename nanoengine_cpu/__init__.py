"""What flash-attn is on a GPU, for a CPU: tensors in, tensors out. It knows no engine.

    optimize(model)         fast modules in place of nn.Linear, nn.RMSNorm, MLPs and attention
    empty_cache(…)          memory for K and V in blocks, as `paged_attention` reads it
    paged_attention(…), rms_norm(…), swiglu(…)      the kernels as functions of tensors
"""

from nanoengine_cpu.functions import (
    columns_above, empty_cache, first_max, paged_attention, rms_norm, swiglu)
from nanoengine_cpu.memory import check_process, end_threads, has_bfloat16, mem_get_info
from nanoengine_cpu.modules import optimize

__all__ = ["check_process", "columns_above", "empty_cache", "end_threads", "first_max",
           "has_bfloat16", "mem_get_info", "optimize", "paged_attention", "rms_norm", "swiglu"]
