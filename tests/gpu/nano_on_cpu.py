"""For a rehearsal: what nano-vllm asks of CUDA, on a CPU. Attention is plain PyTorch."""

import sys
import types

import torch
import triton  # noqa: F401  before torch.cuda is changed

torch.cuda.set_device = torch.cuda.empty_cache = lambda *_: None
torch.cuda.reset_peak_memory_stats = torch.cuda.synchronize = lambda *_: None
torch.cuda.mem_get_info = lambda *_: (2**26, 2**26)
torch.cuda.memory_stats = lambda *_: {
    "allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
torch.Tensor.cuda = lambda self, **_: self
set_default, make = torch.set_default_device, torch.tensor
torch.set_default_device = lambda device: set_default("cpu")
torch.tensor = lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


def attend(q, k, v, scale):
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    ages = torch.arange(len(k))[None] - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ages > 0, -torch.inf).softmax(-1),
                        v.float()).to(q.dtype)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
           causal=False, block_table=None):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
    out = torch.empty_like(q)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        start, stop = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        kk, vv = ((each[block_table[b].clamp(min=0)].flatten(0, 1)[:stop - start]
                   if block_table is not None else each[start:stop]) for each in (k, v))
        out[rows] = attend(q[rows], kk, vv, softmax_scale)
    return out


def with_kvcache(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None,
                 causal=False):
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    return torch.stack([attend(q[b], *(each[block_table[b].clamp(min=0)].flatten(0, 1)[
        :int(cache_seqlens[b])] for each in (k_cache, v_cache)), softmax_scale)
        for b in range(len(q))])


flash_attn = types.ModuleType("flash_attn")
flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache = varlen, with_kvcache
sys.modules["flash_attn"] = flash_attn

import nanovllm.layers.attention as attention  # noqa: E402


def store(key, value, k_cache, v_cache, slots):
    k_cache.flatten(0, 1)[slots.long()] = key
    v_cache.flatten(0, 1)[slots.long()] = value


attention.store_kvcache = store
