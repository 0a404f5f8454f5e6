"""Models that the engine has no code for: transformers computes them, with the engine's cache.

transformers lets a library register an attention function of its own. So one step is one row of
tokens with their positions, from any number of sequences. transformers still computes everything
that treats each token by itself, from the embedding to the logits. Only the attention function
needs to know which token belongs to which sequence, and the engine has one that does:

    transformers   embedding ── norm, q, k, v ─┐        ┌─ MLP ── … ── norm ── head
    the engine                        K and V to the cache, attention

    describe   what the engine must know about a model, from config.json (sources.py calls it)
    load       the model (sources.py calls it); check.py says whether it works,
               modules.py which of its parts have a faster form, as trial.py finds out

The calls of the attention function are the same in each step, so they have numbers: call 5 uses
layer 5 of the cache. Each call is a module (calls.py). Its forward is the part of the engine's own
`Attention` that follows the projection, so a kernel library that knows this forward makes the call
fast.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nanoengine.attention import gather_attention
from nanoengine.errors import also_check, logger, rejected
from nanoengine.step_inputs import StepInputs
from nanoengine_extras.models.transformers_models.calls import Mask, NotComputed
from nanoengine_extras.models.transformers_models.check import check_model
from nanoengine_extras.models.transformers_models.modules import current

# the kinds of layers whose state is K and V of tokens
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# from the original length on, their angles depend on the longest sequence of a step
BY_LENGTH = ("dynamic", "longrope")


def attend(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    return current.attend(*arguments, **options), None


AttentionInterface.register("nanoengine", attend)
AttentionMaskInterface.register("nanoengine", Mask)


# -------------------------------------------------------------------------------- the model


class Given(nn.Module):
    """Stands in for all layers: returns their output, with the hidden states of some rows."""

    output: Any
    # some models call the `decoder` of this part
    decoder = property(lambda self: self)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.output


class Model(nn.Module):
    """A transformers model, with the interface of the engine's `Decoder`.

    causal: transformers' model, with its head.
    calls: one for each call of the attention function in a step
    stack: the engine's own decoder in place of all layers, or None: see own_layers.py
    waits: the lines of code in which a decode step waits for the GPU
    paged_attention: see `Kernels`

    `check_model` sets `calls`, `stack` and `waits`.
    """

    # whether CUDA graphs can capture a decode step
    has_graphs = property(lambda self: not self.waits)
    layers: Any
    head: Any

    def __init__(self, causal: Any, paged_attention: Callable | None) -> None:
        super().__init__()
        self.paged_attention = paged_attention
        self.calls: Any = nn.ModuleList()
        self.stack: Any = None
        self.waits: list[str] = []
        # libraries guarantee invariant rows only for a decoder that they know
        self.embed_tokens = causal.get_input_embeddings()
        self.given = Given()
        # a model for images can contain a whole model for text, with its head
        parts = [each for each in causal.children() if isinstance(each, PreTrainedModel)]
        causal = next((each for each in parts if each.get_output_embeddings()), causal)
        name, layers = next((name, child) for name, child in causal.named_children()
                            if isinstance(child, PreTrainedModel))
        # The same model with a stub for its layers: it computes only what follows them, and may
        # scale or cap the logits. Both models are hidden from libraries, which would mistake
        # their modules for a `Decoder`'s, since the names are the same.
        head = copy.copy(causal)
        head._modules = {**causal._modules, name: self.given}
        vars(self).update(layers=getattr(layers, "decoder", layers), head=head)

    def bind(self, rope: Tensor, caches: Tensor, backend: Callable[..., Tensor] | None) -> None:
        """Gives the calls their memory. rope: not used; the model has its own angles"""
        other = None if backend is gather_attention else self.paged_attention
        for call, cache in zip(self.calls, caches):
            call.bind(cache, backend, other)
        if self.stack:
            self.stack.bind(rope, caches, backend)

    def compute(self, token_ids: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        """Returns the hidden states of all tokens. attend: replaces the attention function."""
        current.attend = attend
        try:
            self.given.output = self.layers(
                input_ids=token_ids[None].long(), position_ids=positions[None].long(),
                attention_mask=torch.ones_like(token_ids)[None], use_cache=False)
        finally:
            # they would keep the memory of a closed engine alive
            vars(current).clear()
        return self.given.output.last_hidden_state[0]

    def forward(self, token_ids: Tensor, step: StepInputs) -> Tensor:
        """Like `Decoder.forward`."""
        if self.stack:
            return self.stack(token_ids, step)
        half = self.calls[0].head_dim // 2
        # cos and sin
        angles = token_ids.new_zeros(2, len(token_ids), 1, half, dtype=torch.float32)
        angles[0] = 1
        calls = iter([call for call in self.calls if not call.is_own])
        vars(current).update(step=step, angles={})

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
                   **options: Any) -> Tensor:
            return next(calls).attend(step, angles, module, query, key, value, options)

        hidden = self.compute(token_ids, step.positions, attend)
        if next(calls, None):
            raise RuntimeError("the model called attention less often than when it was loaded")
        return hidden[step.logits_indices]

    def lm_head(self, hidden: Tensor) -> Tensor:
        self.given.output.last_hidden_state = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self.head(input_ids=ids, use_cache=False).logits[0]


# ---------------------------------------------------------------------------------- loading


def refused(config: PretrainedConfig, reason: object) -> ValueError:
    return ValueError(f"the model's architectures={config.architectures} with model_type="
                      f"{config.model_type!r} is not accepted, since {reason}: it must be one that "
                      "docs/models.md lists, and its files must fit its config.json")


def describe(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config that the engine needs for a model. `load` adds the shape of its KV cache.

    Raises ValueError for layers whose state is not K and V of tokens.
    """
    text = config.get_text_config(decoder=True)
    if others := sorted({*(getattr(text, "layer_types", None) or ())} - ATTENTION):
        raise refused(config, f"its layers of kind {others} keep state outside a KV cache")
    # the second name is Whisper's
    names = "max_position_embeddings", "max_target_positions"
    longest = next(filter(None, (getattr(text, name, None) for name in names)), 2048)
    rope = getattr(text, "rope_parameters", None) or {}
    for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        original = each.get("original_max_position_embeddings") or longest
        if each.get("rope_type") in BY_LENGTH and original < longest:
            longest = original
            logger.warning(
                f"max_model_len is at most {longest}: beyond it, "
                f"rope_type={each['rope_type']!r} depends on the longest sequence of a step")
    # a model for images can have these in either place
    found: dict[str, Any] = {}
    for name in ("quantization_config", "eos_token_id"):
        places = (getattr(each, name, None) for each in (config, text))
        found[name] = next((value for value in places if value is not None), None)
    described = PretrainedConfig()
    # the table of these angles is not used
    vars(described).update(found, original=config, max_position_embeddings=longest,
                           rope_parameters={"rope_type": "default", "rope_theta": 1.0},
                           vocab_size=text.vocab_size, _name_or_path=config.name_or_path)
    return described


def load_causal(runner: Any, folder: Path, read: Callable[..., Any], is_packed: bool) -> Any:
    """Returns transformers' own model. read, is_packed: see `load`"""
    config = runner.model_config.original
    name = str(config.architectures[0])
    kind: Any = getattr(transformers, name, None)
    # some makers have their own class, or spell its name differently
    family = name.removesuffix("ForCausalLM").replace("_", "").lower()
    is_of_maker = not kind and family == config.model_type.replace("_", "")
    # the class can be another model's: a Mistral with layer_types has the config of Ministral
    configs = None, type(config), type(config.get_text_config(decoder=True))
    if is_of_maker or getattr(kind, "config_class", None) not in configs:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind)
    if not hasattr(kind, "generate"):
        raise NotComputed(f"transformers has no architectures={config.architectures} for text")
    options: dict[str, Any] = dict(dtype=runner.dtype, attn_implementation="eager")
    if runner.device == "cpu":
        # expert by expert: the check in float32 need not convert the matrices of all
        options["experts_implementation"] = "eager"
    if not is_packed:
        with torch.device("meta"):
            sizes = kind._from_config(copy.deepcopy(config), **options)
        also_check("memory", sizes.parameters(), runner.device)
    if runner.config.load_format == "dummy":
        torch.default_generator.manual_seed(0)
        causal = kind._from_config(config, **options)
    else:
        causal, found = read(
            kind, folder, config=config, local_files_only=True, use_safetensors=True,
            trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
            **options)
        for name, given, right in sorted(found["mismatched_keys"]):
            raise NotComputed(f"its {name} has the shape {[*given]}, and not {[*right]}")
        if found["missing_keys"]:
            raise NotComputed(f"its files lack {sorted(found['missing_keys'])[:3]}")
        if found["unexpected_keys"]:
            logger.warning(
                f"transformers does not use {sorted(found['unexpected_keys'])[:3]} and others")
    if hasattr(causal, "hf_quantizer"):
        raise NotComputed("its weights stay quantized")
    causal.eval().requires_grad_(False)
    # packed weights are on the CPU, and stay packed only if they are not moved
    return causal if runner.device == "cpu" else causal.to(runner.device)


def load(runner: Any, folder: Path, is_packed: bool = False,
         read: Callable = lambda kind, folder, **options: kind.from_pretrained(folder, **options),
         ) -> Model:
    """Returns the model. Raises ValueError for one whose results differ in the engine's steps.

    read: in place of `from_pretrained`; quantized weights replace it. is_packed: whether the
        weights take less memory than their dtype would.
    """
    if runner.config.cpu_offload_gb:
        raise rejected("cpu_offload_gb", runner.config.cpu_offload_gb,
                       "0 for a model that transformers computes")
    try:
        # the caller may have autocast enabled, another default device, or a seed of their own
        with (torch.inference_mode(), torch.device("cpu"), torch.random.fork_rng(devices=[]),
              torch.autocast(runner.device, enabled=False)):
            torch.default_generator.manual_seed(0)
            causal = load_causal(runner, folder, read, is_packed)
            model = Model(causal, getattr(runner.kernels, "paged_attention", None))
            check_model(runner, model, causal)
    except Exception as error:
        kind = "" if isinstance(error, NotComputed) else f"{type(error).__name__}: "
        raise refused(runner.model_config.original, f"{kind}{error}") from error
    return model
