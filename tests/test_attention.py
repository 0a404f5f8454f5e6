"""Every attention backend against the same computation in plain torch. The CPU's own kernel has its
tests in `cpu/test_paged_attention.py`."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import check_refused
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from cpu.reference import (
    BF16, F32, NO_NORMS, Step, make_step, norm_and_rotate, plain_attention, random_cache,
    random_norms)
from fake_gpu import FakeGpu
from nanoengine import LLM, SamplingParams, attention, features as seams
from nanoengine.attention import (
    BACKENDS, Backend, backends, choose_backend, gather_attention)
from nanoengine.config import EngineConfig
from nanoengine.features import optional
from nanoengine.model import Attention


def chosen(name: str, device: str, dtype: torch.dtype, block_size: int) -> str:
    config = EngineConfig("m", device=device, attention_backend=name, block_size=block_size)
    return choose_backend(config, dtype)


def make_layer(kv_heads, group_size, head_dim, window, norms):
    """A layer of a decoder whose hidden states are queries, keys and values already."""
    config_class = LlamaConfig if norms is NO_NORMS else Qwen3Config
    layer = Attention(config_class(
        hidden_size=kv_heads * group_size, num_attention_heads=kv_heads * group_size,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=1), 0)
    assert isinstance(layer.q_norm, nn.Identity) == (norms is NO_NORMS)
    layer.qkv_proj = layer.o_proj = nn.Identity()
    layer.q_norm, layer.k_norm = norms
    layer.window = window
    return layer


SHAPES = [(2, 1, 32, 16, None), (1, 2, 64, 128, 7), (2, 4, 80, 5, None), (1, 8, 128, 32, 300),
          (3, 3, 24, 1, 40), (1, 4, 256, 32, None), (1, 24, 64, 32, None)]
COMPUTED = [0, 700, 0, 15, 260, 31]


@pytest.mark.parametrize("num_tokens, has_norms", [
    ([1, 1, 9, 1, 40, 2], True), ([3, 1, 2, 5, 1, 1], True), ([1] * 6, False), ([1] * 6, True)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window", SHAPES)
def test_gathered_keys_against_plain_torch(
        kv_heads, group_size, head_dim, block_size, window, dtype, num_tokens, has_norms):
    torch.manual_seed(0)
    tolerance = 3e-6 if dtype == F32 else 2e-2
    step = make_step(num_tokens, COMPUTED, block_size)
    cache = random_cache(kv_heads, head_dim, block_size, step, dtype)
    heads, before = kv_heads * group_size, cache.clone()
    qkv = torch.randn(sum(num_tokens), heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.randn(sum(num_tokens), head_dim // 2)
    angles = torch.stack((angles.cos(), angles.sin()))
    norms = random_norms(head_dim, dtype) if has_norms else NO_NORMS
    layer = make_layer(kv_heads, group_size, head_dim, window, norms)
    layer.cache, layer.backend = cache, gather_attention
    out = layer(qkv.clone().flatten(1), angles[:, :, None], step, slice(None))
    out = out.unflatten(1, (heads, head_dim))
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    query, key = (norm_and_rotate(x, norm, angles) for x, norm in zip((query, key), norms))
    written = cache.flatten(1, 2)[:, step.slot_mapping]
    torch.testing.assert_close(written[0].double(), key, atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], value)
    before.flatten(1, 2)[:, step.slot_mapping] = written
    assert torch.equal(cache, before), "and nothing else was written"
    expected = plain_attention(query, cache, window, step)
    assert out.dtype == dtype and out.shape == query.shape
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [[1, 1, 9, 1, 40, 2], [3, 1, 2, 5, 1, 1], [1] * 6])
@pytest.mark.parametrize("kv_heads, group_size, head_dim, block_size, window", SHAPES)
@pytest.mark.parametrize("backend", [
    name for name in ("flash-attn", "varlen") if name in backends()])
def test_kernels_of_others_against_plain_torch(
        backend, kv_heads, group_size, head_dim, block_size, window, num_tokens):
    """On a GPU that is not there, which checks what they are called with. Pages are of 256."""
    if backend == "varlen" and torch.__version__ < "2.12":
        pytest.skip("PyTorch's varlen kernel takes block tables from 2.12 on")
    torch.manual_seed(0)
    step = make_step(num_tokens, COMPUTED, 256)
    cache = random_cache(kv_heads, head_dim, 256, step, BF16)
    query = torch.randn(sum(num_tokens), kv_heads * group_size, head_dim).to(BF16)
    with FakeGpu() as gpu:
        on_gpu = {name: value.to("cuda") if isinstance(value, torch.Tensor) else value
                  for name, value in vars(step).items()}
        inputs = query.to("cuda"), cache.to("cuda"), window, Step(**on_gpu)
        gpu.reset_counters()
        out = backends()[backend].attend(*inputs)
        assert not gpu.host_reads, "no value is read on the host"
        out = out.cpu()
    expected = plain_attention(query, cache, window, step)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    flash = ["decode_kernel"] * (num_tokens[0] == 1) + ["varlen_kernel"] * (max(num_tokens) > 1)
    called = [name for name in gpu.kernels if name in ("decode_kernel", "varlen_kernel")]
    assert called == (flash if backend == "flash-attn" else ["varlen_kernel"])


@pytest.fixture
def triton(monkeypatch):
    """Whether the library for a GPU is there: call it with True or False."""
    def set_library(is_there):
        library = SimpleNamespace(paged_attention=len) if is_there else None
        known = seams.kernels("cpu")
        backends = pytest.importorskip("nanoengine_extras.running.backends")
        for module in (attention, backends):
            monkeypatch.setattr(
                module, "kernels", lambda device: library if device == "cuda" else known)
    return set_library


@pytest.mark.parametrize("device, dtype, flash, has_triton, version, expected", [
    ("cpu", torch.float32, True, True, "2.13.0", "numba"),
    ("cpu", torch.bfloat16, True, False, "2.13.0", "numba"),
    ("cuda", torch.bfloat16, True, True, "2.11.0", "flash-attn"),
    ("cuda", torch.float16, False, True, "2.13.0", "triton"),
    ("cuda", torch.float16, False, False, "2.12.0", "varlen"),
    ("cuda", torch.bfloat16, False, True, "2.9.1", "triton"),
    ("cuda", torch.bfloat16, False, False, "2.9.1", "gather"),
    ("cuda", torch.float32, True, True, "2.13.0", "triton"),
    ("cuda", torch.float32, True, False, "2.13.0", "gather"),
    ("cpu", torch.float16, True, True, "2.13.0", "gather"),
])
def test_the_choice_of_a_backend(
        monkeypatch, triton, device, dtype, flash, has_triton, version, expected):
    triton(has_triton)
    module = SimpleNamespace(flash_attn_with_kvcache=len) if flash else None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    optional.cache_clear()
    assert chosen("auto", device, dtype, 256) == expected
    assert chosen("gather", device, dtype, 16) == "gather", "it can always be asked for"
    assert chosen(expected, device, dtype, 256) == expected
    ranked = ["flash-attn", "triton", "varlen"]
    for name in backends().keys() - {expected, "gather"}:
        # one of a lower rank may work as well
        if expected not in ranked or name not in ranked[ranked.index(expected):]:
            with pytest.raises(ValueError, match=f"attention_backend='{name}' .* one of"):
                chosen(name, device, dtype, 256)
    if expected in ("flash-attn", "varlen"):
        check_refused("block_size=16 .* multiple of 256", chosen, "auto", device, dtype, 16)


# flash-attn 4 is a package of this name, and has other functions
@pytest.mark.parametrize("content", [
    "raise ImportError('undefined symbol: of a torch')", "import no_such_package", ""])
def test_a_package_that_cannot_be_used_falls_through_to_the_next_backend(
        monkeypatch, tmp_path, triton, content):
    triton(False)
    (tmp_path / "flash_attn.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.0"))
    optional.cache_clear()
    assert chosen("auto", "cuda", torch.bfloat16, 256) == "varlen"
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(ValueError, match="attention_backend='flash-attn'"):
        chosen("flash-attn", "cuda", torch.bfloat16, 256)


def test_a_backend_from_outside_works_by_its_name(tiny, monkeypatch):
    calls = []

    def attend(query, cache, window, step):
        calls.append(len(query))
        return gather_attention(query, cache, window, step)

    def works(device, dtype):
        return device == "cpu" and dtype == torch.float32

    options = dict(block_size=16, num_kv_blocks=20, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4)
    for backend in (Backend(attend, works), Backend(attend, works, rank=9)):
        monkeypatch.setitem(BACKENDS, "mine", backend)
        name = chosen("auto", "cpu", torch.float32, 16)
        assert name == ("mine" if backend.rank else "numba"), "a candidate only if it says so"
        with LLM(tiny, dtype="float32", attention_backend="mine", **options) as llm:
            assert llm.metrics()["attention_backend"] == "mine"
            tokens = llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids
    assert calls == [3, 3, 1, 1, 1, 1, 1, 1] * 2
    with LLM(tiny, dtype="float32", attention_backend="gather", **options) as llm:
        assert llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids == tokens
    accepted = "one of .*'numba'.* for torch.bfloat16 on cpu"
    for dtype, name in (("bfloat16", "mine"), ("bfloat16", "unknown")):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' .* must be {accepted}"):
            LLM(tiny, dtype=dtype, attention_backend=name)
    monkeypatch.setitem(BACKENDS, "mine", Backend(attend, works, block_multiple=32))
    with pytest.raises(ValueError, match="block_size=16 .* a multiple of 32 for mine"):
        LLM(tiny, dtype="float32", attention_backend="mine", **options)
