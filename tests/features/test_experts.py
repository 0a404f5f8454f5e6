"""Experts as gated MLPs: which modules are known, and what they compute."""

import importlib

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from nanoengine_extras.cpu.modules import optimize
from nanoengine_extras.models import experts
from nanoengine_extras.models.transformers_models.modules import GatedMLP

SIZES = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_experts=6,
             num_local_experts=6, n_routed_experts=6, num_experts_per_tok=3)
# the prefixes of transformers' classes, by the names of their modules
KNOWN = {"qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "mixtral": "Mixtral", "olmoe": "Olmoe",
         "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "phimoe": "Phimoe",
         "granitemoe": "GraniteMoe", "ernie4_5_moe": "Ernie4_5_Moe", "gpt_oss": "GptOss"}


def make(name: str, **changes: object) -> torch.nn.Module:
    """transformers' module with the experts of a layer."""
    config = transformers.AutoConfig.for_model(name, **SIZES | changes)
    config._experts_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = next(getattr(module, f"{KNOWN[name]}{end}") for end in ("Experts", "NaiveMoe")
               if hasattr(module, f"{KNOWN[name]}{end}"))
    made = own(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for each in made.parameters():
        each.copy_(torch.randn(each.shape, generator=generator) * 0.3)
    return made


class Limited(torch.nn.SiLU):
    """Only large numbers show the limit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(max=7.0))


# other activations than SiLU
OTHERS = [("qwen3_moe", dict(hidden_act="gelu")), ("mixtral", dict(hidden_act="relu")),
          ("qwen3_moe", dict(act_fn=Limited()))]


@pytest.mark.parametrize("name, changes", [(name, {}) for name in KNOWN] + OTHERS)
def test_known_experts(name, changes):
    """Those of gpt_oss have biases, transposed matrices and an activation of their own."""
    module = make(name, **{key: value for key, value in changes.items() if key != "act_fn"})
    module.act_fn = changes.get("act_fn", getattr(module, "act_fn", None))
    assert experts.kind_of(module)
    x, which, weights = inputs(9)
    found = experts.build(module)
    assert (found.act is None) == (name != "gpt_oss" and not changes)
    torch.testing.assert_close(found(x, which, weights), module(x, which, weights))


def test_others_stay():
    """Experts that compute something else."""
    module = make("mixtral")
    forward = module.forward
    module.forward = lambda *given: forward(*given) + 1e-3
    assert not experts.kind_of(module)


def inputs(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Rows, three experts of each, and their weights."""
    generator = torch.Generator().manual_seed(1)
    which = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(count)])
    return (torch.randn(count, 32, generator=generator).to(dtype), which,
            torch.rand(count, 3, generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# 20 inputs are padded, so that experts run one by one
@pytest.mark.parametrize("size", [64, 20])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(dtype, size):
    module = make("qwen3_moe", moe_intermediate_size=size).to(dtype)
    found = experts.build(module)
    optimize(torch.nn.ModuleList(each for each in found.modules() if type(each) is GatedMLP))
    optimize(torch.nn.ModuleList(
        each for each in found.modules() if type(each) is torch.nn.Linear), has_attention=False)
    given = inputs(40, dtype)
    together = found(*given)
    assert (found.calls is None) == (size == 20)
    for number in range(40):
        row = [each[number:number + 1] for each in given]
        assert torch.equal(found(*row), together[number:number + 1])
    right = make("qwen3_moe", moe_intermediate_size=size).to(dtype)(*given)
    assert (together - right).norm() < 2 * torch.finfo(dtype).eps * right.norm()


def test_without_kernels_they_are_those_of_transformers(make_model):
    folder, _ = make_model("Qwen3Moe", **SIZES | dict(num_hidden_layers=1, head_dim=16))
    found = []
    for kernels in (True, False):
        with LLM(folder, dtype="float32", block_size=16, num_kv_blocks=32, max_num_seqs=4,
                 kernels=kernels) as llm:
            modules = [*llm.engine.runner.model.layers.modules()]
            assert any(isinstance(each, experts.Experts) for each in modules) == kernels
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs = llm.generate([[5, 6, 7], [9] * 20], params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
