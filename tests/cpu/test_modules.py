"""`optimize`: modules of a decoder become fast in place, and compute what they did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpu.reference import make_step, norm_and_rotate, plain_attention
from nanoengine_cpu import empty_cache, optimize
from nanoengine_cpu.compiling import warn_once
from nanoengine_cpu.modules import PackedLinear
from nanoengine_cpu.products import MOST_WORDS

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 32


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * 80)
        self.down_proj = nn.Linear(80, HIDDEN, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, has_norms):
        super().__init__()
        self.head_dim, self.window = HEAD_DIM, None
        self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(HEAD_DIM, eps=1e-3) if has_norms else nn.Identity() for _ in range(2))

    def forward(self, x, angles, step, rows):
        qkv = self.qkv_proj(x).unflatten(1, (-1, HEAD_DIM))
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.cache.flatten(1, 2)[0, step.slot_mapping] = norm_and_rotate(
            key, self.k_norm, angles).to(x.dtype)
        self.cache.flatten(1, 2)[1, step.slot_mapping] = value
        query = norm_and_rotate(query, self.q_norm, angles).to(x.dtype)
        attended = plain_attention(query, self.cache, self.window, step)
        return self.o_proj(attended.to(x.dtype).flatten(1)[rows])


class Model(nn.Module):
    def __init__(self, dtype, has_norms=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.self_attn = Attention(has_norms)
        self.mlp = MLP()
        self.to(dtype).requires_grad_(False)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)

    def forward(self, x, *inputs):
        return self.mlp(self.norm(x)[inputs[-1]] + self.self_attn(x, *inputs))


def bind(model, step, dtype, make):
    num_blocks = int(step.block_tables.max()) + 1
    model.self_attn.cache = make(1, num_blocks, 16, KV_HEADS, HEAD_DIM, dtype)[0]


def zeros(layers, num_blocks, block_size, kv_heads, head_dim, dtype):
    return torch.zeros(layers, 2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_modules_change_in_place_and_compute_the_same(dtype, tolerance, has_norms):
    step = make_step([1, 9, 1], [0, 0, 0], 16)
    x, angles = torch.randn(11, HIDDEN).to(dtype), torch.rand(2, 11, HEAD_DIM // 2)
    inputs = x, angles, step, torch.tensor([0, 9, 10])
    model = Model(dtype, has_norms)
    bind(model, step, dtype, zeros)
    expected = model(*inputs)

    modules, names = dict(model.named_modules()), [name for name, _ in model.named_parameters()]
    calls = []
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert optimize(model), "rows are invariant"
    assert dict(model.named_modules()) == modules
    assert [name for name, _ in model.named_parameters()] == names
    bind(model, step, dtype, empty_cache)
    found = model(*inputs)
    assert found.dtype == dtype and found.shape == (3, HIDDEN)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    within = {"self_attn.q_norm", "self_attn.k_norm"}
    assert set(calls) == modules.keys() - within, "of which the kernel computes some"


def test_attention_may_be_left_out():
    model = Model(torch.float32)
    assert not optimize(model, has_attention=False)
    assert type(model.self_attn) is Attention and type(model.mlp) is not MLP


@pytest.mark.parametrize("norm", [
    nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-6, elementwise_affine=False)])
def test_norms_that_no_kernel_knows_stay_as_they_are(norm):
    x = torch.randn(3, 8)
    expected = norm(x)
    assert optimize(norm) and type(norm) is nn.RMSNorm
    assert torch.equal(norm(x), expected)


def test_what_is_set_later_counts():
    """What a forward needs lies in `__dict__`, beside where torch keeps it."""
    model = Model(torch.float32)
    optimize(model)
    x = torch.randn(5, HIDDEN)
    for number in (1.0, 2.0):
        model.norm.weight = nn.Parameter(torch.full((HIDDEN,), number), False)
        torch.testing.assert_close(
            model.norm(x), number * F.rms_norm(x, (HIDDEN,), eps=1e-5))
    model.mlp.down_proj = nn.Identity()
    assert model.mlp(x).shape == (5, 80)
    plain = nn.Linear(HIDDEN, 7).requires_grad_(False)
    linear = model.mlp.gate_up_proj
    linear.weight, linear.bias = plain.weight, plain.bias
    assert torch.equal(linear(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs, outputs", [(40, 24), (256, 100)])
def test_a_row_has_the_same_bits_in_few_and_in_many(inputs, outputs, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs).requires_grad_(False).to(dtype)
    x = torch.randn(300, inputs).to(dtype)
    exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    optimize(linear)
    together = linear(x)
    torch.testing.assert_close(
        together.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
    for num_rows in (1, 2, 3, 4, 5, 33):
        assert torch.equal(linear(x[7:7 + num_rows]), together[7:7 + num_rows])
    assert linear(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("linear", [
    nn.Linear(HIDDEN, 7).half(), nn.Linear(MOST_WORDS + 1, 7), nn.Linear(HIDDEN, 7).double()])
def test_weights_that_no_kernel_knows_are_multiplied_by_pytorch(caplog, linear):
    linear.requires_grad_(False)
    x = torch.randn(5, linear.in_features).to(linear.weight.dtype)
    expected = linear(x)
    warn_once.cache_clear()
    assert not optimize(nn.Sequential(linear, nn.Linear(HIDDEN, 3).requires_grad_(False)))
    (message,) = caplog.messages
    assert message.startswith("products are slower: there is no kernel for ")
    assert torch.equal(linear(x), expected) and isinstance(linear, PackedLinear)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_mlp_has_swiglu_whether_its_weight_is_packed_or_not(dtype):
    mlp = MLP().to(dtype).requires_grad_(False)
    x = torch.randn(5, HIDDEN).to(dtype)
    expected = mlp(x)
    optimize(mlp)
    torch.testing.assert_close(mlp(x), expected, rtol=2**-6, atol=2**-6)


LIMITS = """
import numba, torch
from nanoengine_cpu import optimize
model = torch.nn.Linear(8, 8).requires_grad_(False)
optimize(model)
for limit in (1, 2, 1):
    torch.set_num_threads(limit)
    model(torch.ones(4, 8))
    print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_kernels_run_on_as_many_threads_as_pytorch_s_operators():
    printed = subprocess.check_output([sys.executable, "-c", LIMITS], text=True)
    assert printed == "1 1\n2 2\n1 1\n"


def test_kernels_are_compiled_when_the_model_is_made_fast():
    """None when it computes, and none at all in a second process: all are kept on disk."""
    script = """if True:
        import numba, torch
        from cpu.reference import make_step
        from cpu.test_modules import HEAD_DIM, HIDDEN, Model, bind
        from nanoengine_cpu import empty_cache, optimize

        class Listener(numba.core.event.Listener):
            count = 0
            def on_start(self, event):
                self.count += 1
            on_end = lambda self, event: None

        numba.core.event.register("numba:compile", listener := Listener())
        model, step = Model(torch.bfloat16), make_step([1, 9], [0, 0], 16)
        optimize(model, block_size=16)
        at_start = listener.count
        bind(model, step, torch.bfloat16, empty_cache)
        x = torch.randn(10, HIDDEN).bfloat16()
        model(x, torch.rand(2, 10, HEAD_DIM // 2), step, torch.tensor([0, 9]))
        print(at_start, listener.count - at_start)"""
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{Path(__file__).parents[1]}"
    first, second = (
        subprocess.check_output([sys.executable, "-c", script], text=True,
                                env=os.environ | {"PYTHONPATH": paths}).split() for _ in range(2))
    assert first[1] == "0" and second == ["0", "0"]
