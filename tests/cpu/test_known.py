"""What `optimize` takes, and what keeps its own forward: all compute what they did before."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cpu.test_modules import make_decoder, make_layer
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaConfig

from nanoengine import LLM, SamplingParams, loader, model as plain
from nanoengine.model import MLP, swiglu
from nanoengine_extras.cpu import knows_attention, modules, optimize
from nanoengine_extras.known import has_code_of
from nanoengine_extras.cpu.modules import GatedMLP, Layers, PackedLinear, PagedAttention

close = torch.testing.assert_close
ROOT = Path(__file__).parents[2]


def twice(x):
    return 2 * x


def fast(module):
    """A module without gradients, and what it is after `optimize`."""
    module.requires_grad_(False)
    before = copy.deepcopy(module)
    optimize(module)
    return before, module


# ------------------------------------------------------------------------------- nn.Linear


def inputs_of(size):
    numbers = torch.randn(6, 5, 2 * size)
    return {
        "one": numbers[0, 0, :size], "three": numbers[..., :size], "none": numbers[:0, 0, :size],
        "four": numbers[..., :size].unflatten(0, (2, 3)), "no rows": numbers[:, :0, :size],
        "every second": numbers[..., ::2], "shifted": numbers[1:, 0, 1:size + 1],
        "transposed": numbers[..., :size].transpose(0, 1), "columns": torch.randn(size, 7).T,
        "one row, repeated": numbers[:1, 0, :size].expand(9, size)}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (40, 24), (1, 1), (7, 3)], ids=str)
def test_inputs_of_any_shape(dtype, tolerance, bias, sizes):
    """The weight is seen as it was, in the module's own attribute and in what is saved."""
    before, linear = fast(nn.Linear(*sizes, bias=bias).to(dtype))
    for name, x in inputs_of(sizes[0]).items():
        found, expected = linear(x.to(dtype)), before(x.to(dtype))
        assert found.shape == expected.shape and found.is_contiguous(), name
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), name
    assert linear.is_packed and torch.equal(linear.weight, before.weight)
    saved = linear.state_dict()
    assert saved.keys() == before.state_dict().keys() == dict(linear.named_parameters()).keys()
    assert all(torch.equal(saved[name], each) for name, each in before.state_dict().items())


@pytest.mark.parametrize("x", [
    torch.ones(3, 64).double(), torch.ones(3, 64).half(), torch.ones(3, 64, dtype=torch.long),
    torch.ones(3, 63), torch.ones(()), torch.ones(0), torch.ones(3, 64, device="meta"),
    torch.ones(3, 64, dtype=torch.complex64)], ids=lambda x: f"{x.dtype}{[*x.shape]}{x.device}")
def test_other_inputs_get_pytorch_s_own_answer(x):
    answers = []
    for linear in fast(nn.Linear(64, 32)):
        try:
            answers.append((linear(x).shape, linear(x).dtype))
        except Exception as error:
            answers.append((type(error), str(error)))
    assert answers[0] == answers[1]


def test_modes_of_pytorch():
    before, linear = fast(nn.Linear(64, 32))
    x = torch.randn(3, 64)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad(),
                 torch.autocast("cpu", torch.bfloat16)):
        with mode:
            close(linear(x), before(x))
    negative = torch.randn(3, 64, dtype=torch.complex64).conj().imag
    assert negative.is_neg()

    def tangent(each):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            return torch.autograd.forward_ad.unpack_dual(each(dual)).tangent

    def gradient(each):
        watched = x.clone().requires_grad_()
        each(watched).square().sum().backward()
        return watched.grad

    for of in (lambda each: torch.vmap(each)(x), lambda each: torch.func.jacrev(each)(x),
               lambda each: torch.func.jvp(each, (x,), (x,)), lambda each: each(negative),
               tangent, gradient):
        close(of(linear), of(before))


def test_a_weight_with_gradients_is_packed_and_still_gets_them():
    linear = nn.Linear(64, 32)
    before = copy.deepcopy(linear)
    optimize(linear)
    x = torch.randn(2, 5, 64)
    close(linear(x), before(x))
    linear(x).square().sum().backward()
    before(x).square().sum().backward()
    close(linear.bias.grad, before.bias.grad)
    assert linear._parameters["weight"].grad is not None
    with torch.no_grad():
        close(linear(x), before(x))


@pytest.mark.parametrize("assign", [False, True])
def test_a_packed_weight_can_be_loaded_anew(assign):
    """And copied, changed, and cast."""
    _, linear = fast(nn.Linear(64, 32))
    other = nn.Linear(64, 32).requires_grad_(False)
    linear.load_state_dict(other.state_dict(), assign=assign)
    x = torch.randn(3, 64)
    close(linear(x), other(x))
    assert linear.is_packed
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear.load_state_dict(nn.Linear(63, 31).state_dict())
    close(linear(x), other(x))
    copied = copy.deepcopy(linear)
    assert torch.equal(copied(x), linear(x))
    copied.weight = nn.Parameter(copied.weight * 2, False)
    assert not torch.equal(copied(x), linear(x))
    optimize(linear)
    assert type(linear).__mro__.count(PackedLinear) == 1, "optimized twice"
    for dtype in (torch.bfloat16, torch.float64, torch.float16, torch.float32):
        linear, other = linear.to(dtype), other.to(dtype)
        assert linear.weight.dtype == dtype
        close(linear(x.to(dtype)), other(x.to(dtype)), rtol=2e-2, atol=2e-2)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    name = "mine"


class Square(nn.Module):
    def forward(self, x):
        return x * x


def patched(linear):
    linear.forward = lambda x: F.linear(x, linear.weight) * 3
    return linear


def pruned(linear):
    prune.l1_unstructured(linear, "weight", 0.5)
    return linear


def hooked(linear):
    linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    linear.register_forward_hook(lambda module, inputs, out: out + 1)
    return linear


def sharing(first):
    second = nn.Linear(32, 32)
    second.weight = first.weight
    return nn.Sequential(first, second, first)


@pytest.mark.parametrize("make, is_known", [
    (lambda linear: Named(32, 32), True), (hooked, True), (sharing, True),
    # classes that inherit from a linear, and linears that are not what they seem
    (lambda linear: Doubled(32, 32), False), (patched, False), (pruned, False),
    (parametrizations.weight_norm, False),
    (lambda linear: parametrize.register_parametrization(linear, "weight", Square()), False),
    (lambda linear: parametrize.register_parametrization(linear, "bias", Square()), False),
    # modules that read a weight themselves
    (lambda linear: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), None)])
def test_all_linears_compute_what_they_did(make, is_known):
    x = torch.randn(2, 3, 32)
    module = make(nn.Linear(32, 32)).requires_grad_(False)
    kind, expected = type(module), module(x)
    optimize(module)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            close(module(x), expected)
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    if is_known is not None:
        assert {isinstance(each, PackedLinear) for each in linears} == {is_known}
        assert isinstance(module, kind) and getattr(module, "name", "mine") == "mine"


def test_a_head_can_share_the_weight_of_an_embedding():
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    _, tied = fast(nn.ModuleList([embedding, head]))
    x = embedding(torch.tensor([3]))
    close(head(x), x @ embedding.weight.T)


# ------------------------------------------------------------------------------------- MLPs


CONFIG = LlamaConfig(hidden_size=48, intermediate_size=96, num_attention_heads=4, mlp_bias=True)


class Counting(MLP):
    """Calls the known forward."""

    def forward(self, x):
        return super().forward(x)


class Same(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same without comments, docstrings, types and layout."""
        # the same
        return self.down_proj(
            swiglu(self.gate_up_proj(x)))


class GeluOfGate(MLP):
    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate) * up)


class WithScale(MLP):
    def forward(self, x, scale=0.5):
        return self.down_proj(swiglu(self.gate_up_proj(x))) * scale


class Plus(MLP):
    def forward(self, x):
        return self.down_proj(swiglu(self.gate_up_proj(x))) + 0


made = {"MLP": MLP, "swiglu": swiglu}
exec("class WithoutSource(MLP):\n    def forward(self, x):\n"
     "        return self.down_proj(swiglu(self.gate_up_proj(x)))", made)


@pytest.mark.parametrize("kind, is_known", [(MLP, True), (Same, True), *dict.fromkeys(
    (Counting, GeluOfGate, WithScale, Plus, made["WithoutSource"]), False).items()])
@pytest.mark.parametrize("dtype, tolerance, is_packed", [
    (torch.float32, 1e-4, True), (torch.bfloat16, 2**-4, True), (torch.float16, 2**-6, False)])
def test_mlps(kind, is_known, dtype, tolerance, is_packed):
    """Those that are not known keep their forward."""
    before, mlp = fast(kind(CONFIG).to(dtype))
    for shape in ((48,), (2, 3, 48), (0, 48), (2, 0, 48)):
        x = (5 * torch.randn(*shape)).to(dtype)
        close(mlp(x), before(x), rtol=tolerance, atol=tolerance)
        # the first product is plain
        close(mlp.gate_up_proj(x), before.gate_up_proj(x), rtol=tolerance, atol=tolerance)
    assert isinstance(mlp, kind) and isinstance(mlp, GatedMLP) == is_known
    assert mlp.gate_up_proj.is_packed == mlp.down_proj.is_packed == is_packed
    assert has_code_of(GatedMLP, kind(CONFIG)) == is_known
    assert is_known or not optimize(mlp)


def test_a_forward_of_a_module_or_one_of_its_functions_can_be_another(monkeypatch):
    mlp = MLP(CONFIG)
    mlp.forward = twice
    optimize(mlp)
    assert mlp(torch.ones(1)) == 2
    monkeypatch.setitem(MLP.forward.__globals__, "swiglu", lambda x: x[..., :96])
    before, mlp = fast(MLP(CONFIG))
    x = torch.randn(2, 48)
    close(mlp(x), before(x))
    monkeypatch.undo()
    assert isinstance(fast(MLP(CONFIG))[1], GatedMLP)
    monkeypatch.setattr(MLP, "forward", GeluOfGate.forward)
    assert not isinstance(fast(MLP(CONFIG))[1], GatedMLP)


def test_hooks_and_gradients_of_a_known_mlp():
    before, mlp = fast(MLP(CONFIG))
    x = torch.randn(2, 48, requires_grad=True)
    close(torch.autograd.grad(mlp(x).sum(), x), torch.autograd.grad(before(x).sum(), x))
    for each in (mlp, before):
        each.gate_up_proj.register_forward_hook(lambda module, inputs, out: out * 2)
    close(mlp(x), before(x))


# ------------------------------------------------------------------------ attention, decoders


class Centered(nn.RMSNorm):
    """1 + w, as in Gemma."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def hidden_by(norm):
    norm.forward = twice
    return norm


@pytest.mark.parametrize("norm, is_known", [
    (nn.RMSNorm(8, 1e-6), True), (plain.RMSNorm(8, 1e-6), True), (Centered(8, 1e-6), False),
    (nn.LayerNorm(8), False), (nn.RMSNorm(8, 1e-6, elementwise_affine=False), False),
    (nn.RMSNorm(8), False), (hidden_by(nn.RMSNorm(8, 1e-6)), False), (nn.Identity(), False),
    (parametrize.register_parametrization(nn.RMSNorm(8, 1e-6), "weight", Square()), False)])
def test_norms(norm, is_known):
    assert modules.is_rms_norm(norm) is is_known


@pytest.mark.parametrize("norms", [
    (nn.LayerNorm(16), nn.LayerNorm(16)), (nn.RMSNorm(16, 1e-6), nn.RMSNorm(16, 1e-5)),
    (nn.RMSNorm(16, 1e-6), nn.Identity()), (Centered(16, 1e-6), Centered(16, 1e-6)),
    # of all heads together
    (nn.RMSNorm(64, 1e-6), nn.RMSNorm(32, 1e-6)), (nn.RMSNorm(64, 1e-6), nn.RMSNorm(64, 1e-6))])
def test_attention_with_other_norms_of_heads_is_not_known(norms):
    model = make_layer(torch.float32)
    assert knows_attention(model)
    model.self_attn.q_norm, model.self_attn.k_norm = norms
    assert not knows_attention(model) and not optimize(model)
    assert not isinstance(model.self_attn, PagedAttention) and model.self_attn.qkv_proj.is_packed


def test_no_attention_is_replaced_where_one_is_not_known():
    """They share a cache."""
    decoder = make_decoder(torch.float32)
    decoder.layers[1].self_attn.forward = twice
    assert not optimize(decoder)
    assert not isinstance(decoder.layers[0].self_attn, PagedAttention)
    assert not isinstance(decoder, Layers) and isinstance(decoder.layers[0].mlp, GatedMLP)


def test_a_forward_that_is_set_on_a_layer_runs(monkeypatch):
    decoder = make_decoder(torch.float32)
    decoder.layers[1].forward = lambda x, *_: x * 0 + 3
    assert optimize(decoder)
    decoder.layers[0].forward = lambda x, *_: x
    step = type("Step", (), dict(positions=torch.tensor([0]), logits_indices=torch.tensor([0])))
    close(decoder(torch.tensor([1]), step), decoder.norm(torch.full((1, 48), 3.0)))


# --------------------------------------------------------------------------------- the engine


def test_the_engine_s_own_model_is_known():
    """If not: its forwards were changed. See that the kernels still compute the same, and change
    the docstrings in nanoengine_extras/cpu/modules.py and nanoengine_extras/gpu/modules.py."""
    decoder = make_decoder(torch.float32, hidden=64)
    assert knows_attention(decoder) and optimize(decoder) and isinstance(decoder, Layers)
    assert all(modules.is_known_layer(layer) and modules.is_known_mlp(layer.mlp)
               for layer in decoder.layers)


@pytest.mark.slow
def test_it_is_known_without_docstrings():
    script = ("import sys, torch; sys.path.append('tests'); from cpu.test_modules import *; "
              "print(optimize(make_decoder(torch.float32)))")
    assert subprocess.check_output([sys.executable, "-OO", "-c", script], text=True,
                                   cwd=ROOT).split() == ["True"]


class Scaled(plain.Attention):
    """As families of one's own might have them."""

    def forward(self, *inputs):
        return super().forward(*inputs) / 3


class Turned(plain.Decoder):
    def forward(self, *inputs):
        return super().forward(*inputs).flip(-1)


class Weaker(plain.DecoderLayer):
    def forward(self, x, angles, step, rows):
        return super().forward(x, angles, step, rows) * 0.3 + x[rows] * 0.7


@pytest.mark.parametrize("name, kind", [
    ("Attention", Scaled), ("MLP", GeluOfGate), ("Decoder", Turned), ("DecoderLayer", Weaker),
    ("RMSNorm", Centered)])
def test_a_family_of_one_s_own_computes_what_it_says(monkeypatch, tiny, name, kind):
    """The same tokens as in plain PyTorch, and other ones than the engine's own model."""
    options = dict(dtype="float32", block_size=16, num_kv_blocks=32)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[*range(20, 50)], [7, 8, 9]]

    def tokens(**more):
        with LLM(tiny, **options, **more) as llm:
            runner = llm.engine.runner
            assert not more or runner.is_invariant is False
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs], runner

    usual, _ = tokens()
    monkeypatch.setattr(plain, name, kind)
    if name == "Decoder":
        monkeypatch.setattr(loader, name, kind)
    expected, _ = tokens(kernels=False)
    found, runner = tokens()
    assert found == expected != usual
    linears = [each for each in runner.model.modules() if isinstance(each, nn.Linear)]
    assert linears and all(linear.is_packed for linear in linears)
    assert runner.backend == ("gather" if name in ("Attention", "RMSNorm") else "numba")
    if name == "Attention":
        with pytest.raises(ValueError, match="attention_backend='numba' .* 'gather'"):
            LLM(tiny, attention_backend="numba", **options)
