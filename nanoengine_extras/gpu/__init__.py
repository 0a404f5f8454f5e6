"""Kernels in Triton for decoders on a GPU: tensors in, tensors out. They need no engine.

    optimize(model)         fewer and faster kernels for norms, rotation and SwiGLU of a decoder
    paged_attention(…)      attention over a paged KV cache
    few_rows_linear(…)      the product of a decode of few sequences
    rms_norm(…), swiglu(…), store_heads(…)
                            the other kernels, as functions of tensors
    truncate(…), draw(…)    sampling: the likeliest tokens of each row, and one token of each row

To read: norms.py, few_rows.py, attention.py and sampling.py; modules.py puts the first three into
a model.
Importing this package raises ImportError where Triton is not installed. With TRITON_INTERPRET=1,
set before the import, the same functions take tensors of a CPU: Triton then interprets the kernels,
very slowly.
"""

from nanoengine_extras.gpu.attention import paged_attention
from nanoengine_extras.gpu.few_rows import few_rows_linear
from nanoengine_extras.gpu.modules import optimize
from nanoengine_extras.gpu.norms import rms_norm, store_heads, swiglu
from nanoengine_extras.gpu.sampling import draw, truncate

__all__ = ["draw", "few_rows_linear", "optimize", "paged_attention", "rms_norm", "store_heads",
           "swiglu", "truncate"]
