"""`optimize`: modules of a decoder become fast in place, and compute what they did."""

import functools

import pytest
import torch
from forks import run_in_fork
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from cpu.reference import make_step, plain_attention
from nanoengine.model import MLP, Attention, Decoder, RMSNorm
from nanoengine_extras.cpu import attention, empty_cache, modules, optimize
from nanoengine_extras.cpu.compiling import Program, run_call, warn_once
from nanoengine_extras.cpu.modules import PackedLinear
from nanoengine_extras.cpu.products import MOST_WORDS

# a shape of attention that other tests have, with a soft cap, too
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 16


def attend(query, *inputs, **options):
    return plain_attention(query, *inputs, **options).to(query.dtype)


def step_of(rows):
    """Of a sequence with nine tokens between two with one. rows: those that need an output"""
    step = make_step([1, 9, 1], [0, 0, 0], 16)
    step.logits_indices = torch.tensor(rows, dtype=torch.int32)
    return step


def make_decoder(dtype, has_norms=True, num_layers=2, hidden=HIDDEN):
    """The engine's own. Without norms of heads, the other norms are PyTorch's."""
    torch.manual_seed(0)
    kind = Qwen3Config if has_norms else LlamaConfig
    decoder = Decoder(kind(
        vocab_size=50, hidden_size=hidden, intermediate_size=96, num_hidden_layers=num_layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5)).to(dtype).requires_grad_(False)
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.5, 1.5)
            module.__class__ = RMSNorm if has_norms else nn.RMSNorm
    for layer in decoder.layers:
        layer.self_attn.backend = attend
        if has_norms:
            layer.self_attn.q_norm.eps = layer.self_attn.k_norm.eps = 1e-3
    decoder.rope = torch.rand(2, 100, HEAD_DIM // 2)
    return decoder


def make_layer(dtype, has_norms=True):
    return make_decoder(dtype, has_norms, 1).layers[0]


def give_caches(module, step, dtype, make):
    """To a decoder, or to a layer alone."""
    layers = getattr(module, "layers", [module])
    num_blocks = int(step.block_tables.max()) + 1
    caches = make(len(layers), num_blocks, 16, KV_HEADS, HEAD_DIM, dtype)
    for layer, cache in zip(layers, caches):
        layer.self_attn.cache = cache


def zeros(layers, num_blocks, block_size, kv_heads, head_dim, dtype):
    return torch.zeros(layers, 2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype, tolerance, has_norms, options", [
    (torch.float32, 1e-5, True, {}), (torch.float32, 1e-5, False, {}),
    (torch.bfloat16, 8e-2, True, {}), (torch.bfloat16, 8e-2, False, {}),
    (torch.float32, 1e-4, False, dict(soft_cap=5.0)),
    (torch.float32, 1e-4, False, dict(sinks=torch.arange(4.0) - 2))])
def test_modules_change_in_place_and_compute_the_same(dtype, tolerance, has_norms, options):
    """Attention can have a soft cap and sinks, if its backend heeds them, too."""
    step = step_of([0, 9, 10])
    x, angles = torch.randn(11, HIDDEN).to(dtype), torch.rand(2, 11, 1, HEAD_DIM // 2)
    inputs = x, angles, step, step.logits_indices
    model = make_layer(dtype, has_norms)
    # scores are above the cap
    model.input_layernorm.weight.mul_(8 if options else 1)
    give_caches(model, step, dtype, zeros)
    usual = model(*inputs)
    vars(model.self_attn).update(options, backend=functools.partial(attend, **options))
    expected = model(*inputs)
    assert not options or (expected - usual).abs().max() > 1e-3

    modules, names = dict(model.named_modules()), [name for name, _ in model.named_parameters()]
    calls = []
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert optimize(model), "rows are invariant"
    assert dict(model.named_modules()) == modules
    assert [name for name, _ in model.named_parameters()] == names
    give_caches(model, step, dtype, empty_cache)
    found = model(*inputs)
    assert found.dtype == dtype and found.shape == (3, HIDDEN)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    within = {"self_attn.q_norm", "self_attn.k_norm"}
    assert set(calls) == modules.keys() - within, "of which the kernel computes some"


def test_attention_may_be_left_out():
    model = make_layer(torch.float32)
    assert not optimize(model, has_attention=False)
    assert type(model.self_attn) is Attention and type(model.mlp) is not MLP


def test_what_is_set_later_counts():
    model = make_layer(torch.float32)
    optimize(model)
    x = torch.randn(5, HIDDEN)
    model.mlp.down_proj = nn.Identity()
    assert model.mlp(x).shape == (5, 96)
    plain = nn.Linear(HIDDEN, 7).requires_grad_(False)
    linear = model.mlp.gate_up_proj
    linear.weight, linear.bias = plain.weight, plain.bias
    assert torch.equal(linear(x), plain(x))


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


# ------------------------------------------------------------------------- all layers at once


def fast_decoder(dtype, step, **options):
    """A decoder, optimized, and what it computed before."""
    decoder = make_decoder(dtype, **dict(hidden=64) | options)
    token_ids = torch.randint(50, (len(step.positions),))
    give_caches(decoder, step, dtype, zeros)
    expected = decoder(token_ids, step)
    assert optimize(decoder)
    give_caches(decoder, step, dtype, empty_cache)
    return decoder, token_ids, expected


def counted_runs(monkeypatch):
    runs = []
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda *arguments: runs.append(1) or run(*arguments))
    for module in (attention, modules):
        monkeypatch.setattr(module, "run_call", lambda call: runs.append(1) or run_call(call))
    return runs


@pytest.mark.parametrize("rows", [[0, 9, 10], [], [3] * 40, [10, 0]])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-2)])
def test_all_layers_are_two_programs(
        monkeypatch, dtype, tolerance, has_norms, num_layers, rows):
    """For any rows, which can also repeat."""
    step = step_of(rows)
    decoder, token_ids, expected = fast_decoder(
        dtype, step, has_norms=has_norms, num_layers=num_layers)
    runs = counted_runs(monkeypatch)
    found = decoder(token_ids, step)
    assert len(runs) == 2 and found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_programs_serve_steps_of_all_sizes_and_give_a_token_the_same_bits(monkeypatch):
    step = make_step([40], [0], 16)
    step.logits_indices = torch.arange(40)
    decoder, token_ids, expected = fast_decoder(torch.float32, step)
    together = decoder(token_ids, step)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    give_caches(decoder, step, torch.float32, empty_cache)
    for start, count in ((0, 7), (7, 1), (8, 1), (9, 31)):
        part = slice(start, start + count)
        chunk = make_step([count], [start], 16)
        chunk.block_tables = step.block_tables
        chunk.slot_mapping = step.slot_mapping[part]
        chunk.logits_indices = torch.arange(count)
        assert torch.equal(decoder(token_ids[part], chunk), together[part])


def test_what_is_set_later_counts_in_all_layers(monkeypatch):
    """Weights, modules and caches; and hooks, with which the layers are called one by one."""
    step = step_of([0, 9, 10])
    decoder, token_ids, expected = fast_decoder(torch.float32, step)
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    close(decoder(token_ids, step), expected)

    calls = []
    hooks = [module.register_forward_hook(lambda *_, name=name: calls.append(name))
             for name, module in decoder.named_modules()]
    close(decoder(token_ids, step), expected)
    names = {name for name, _ in decoder.named_modules()}
    assert names - {*calls} == {"layers", "lm_head"} | {
        f"layers.{index}.self_attn.{kind}_norm" for index in (0, 1) for kind in "qk"}
    for hook in hooks:
        hook.remove()

    weight = decoder.layers[1].mlp.down_proj.weight
    decoder.layers[1].mlp.down_proj.weight = nn.Parameter(weight * 0, False)
    changed = decoder(token_ids, step)
    assert not torch.allclose(changed, expected, atol=1e-2)
    decoder.layers[1].mlp.down_proj.weight = nn.Parameter(weight, False)
    give_caches(decoder, step, torch.float32, empty_cache)
    runs = counted_runs(monkeypatch)
    close(decoder(token_ids, step), expected)
    assert len(runs) == 2
    norm = decoder.layers[1].self_attn.q_norm
    norm.weight = nn.Parameter(norm.weight * 3, False)
    assert not torch.allclose(decoder(token_ids, step), expected, atol=1e-2)
    norm.weight = nn.Parameter(norm.weight / 3, False)
    close(decoder(token_ids, step), expected)
    decoder.layers[0].mlp = decoder.layers[1].mlp
    assert not torch.allclose(decoder(token_ids, step), expected, atol=1e-2)


@pytest.mark.parametrize("change", ["padding", "norm", "dtype"])
def test_layers_that_no_program_knows_are_called_one_by_one(monkeypatch, change):
    step = step_of([0, 9, 10])
    hidden = 40 if change == "padding" else 64
    decoder, token_ids, expected = fast_decoder(torch.float32, step, hidden=hidden)
    if change == "norm":
        decoder.layers[0].input_layernorm = nn.LayerNorm(hidden, elementwise_affine=False)
    elif change == "dtype":
        decoder.norm = decoder.norm.double()
    runs = counted_runs(monkeypatch)
    found = decoder(token_ids, step)
    assert len(runs) > 6
    if change in ("padding", "dtype"):
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5)


class Relu(nn.Module):
    """An MLP that no program can run, whose weight has a dtype of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64).double() * 3, False)

    def forward(self, x):
        return (x.double() @ self.weight).relu().to(x.dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize("others", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_a_program_ends_before_another_mlp(monkeypatch, others, dtype, tolerance):
    step = step_of([0, 9, 10, 10])
    decoder, token_ids, before = fast_decoder(dtype, step, num_layers=3)
    for number in others:
        decoder.layers[number].mlp = Relu()
    # called one by one
    with monkeypatch.context() as patch:
        patch.setattr(modules, "is_known_layer", lambda layer: False)
        expected = decoder(token_ids, step)
    assert not torch.allclose(before, expected, atol=0.1)
    decoder.layers[0].mlp = decoder.layers[0].mlp
    runs = counted_runs(monkeypatch)
    torch.testing.assert_close(decoder(token_ids, step), expected, atol=tolerance, rtol=tolerance)
    assert len(runs) == 1 + len(others) + (2 not in others)
    # hooks of the MLP run
    calls = []
    decoder.layers[others[0]].mlp.register_forward_hook(lambda *_: calls.append(1))
    decoder(token_ids, step)
    assert calls == [1] and len(runs) == 2 * (1 + len(others) + (2 not in others))


# ----------------------------------------------------------------------------- the process


LIMITS = """
import numba, torch
from nanoengine_extras.cpu import optimize
model = torch.nn.Linear(8, 8).requires_grad_(False)
optimize(model)
for limit in (1, 2, 1):
    torch.set_num_threads(limit)
    model(torch.ones(4, 8))
    print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_kernels_run_on_as_many_threads_as_pytorch_s_operators():
    done = run_in_fork(LIMITS)
    assert done.stdout == "1 1\n2 2\n1 1\n", done.stderr
