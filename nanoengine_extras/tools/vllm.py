"""vLLM's names for what the engine has: a script for vLLM that keeps to them changes its import.

    from nanoengine_extras.tools.vllm import LLM, SamplingParams

nanoengine's own `LLM` and `SamplingParams` already have vLLM's names for the same options. These
subclasses take a few more, and None for any option's default. An option that the engine lacks is an
error, whatever its value. The engine does not know these subclasses. Outputs are nanoengine's own.
"""

from types import SimpleNamespace
from typing import Any

import nanoengine
from nanoengine import CompletionOutput, RequestOutput  # noqa: F401
from nanoengine.errors import also_check, rejected
from nanoengine_extras.tools import METRIC_NAMES

# types of prompts and grammars: dicts with the same keys
TextPrompt = TokensPrompt = PromptType = StructuredOutputsParams = dict
VLLMValidationError = ValueError


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def plain(prompts: Any) -> Any:
    """Returns the prompts; those that are dicts without keys that are None."""
    if isinstance(prompts, (list, tuple)):
        return [plain(each) if isinstance(each, dict) else each for each in prompts]
    return given(prompts) if isinstance(prompts, dict) else prompts


class SamplingParams(nanoengine.SamplingParams):
    """nanoengine's parameters. None stands for the default, except for `max_tokens`."""

    def __init__(self, *, max_tokens: int | None = 16, structured_outputs: Any = None,
                 **options: Any) -> None:
        also_check("names", nanoengine.SamplingParams, (), options)
        super().__init__(max_tokens=max_tokens, structured_outputs=plain(structured_outputs),
                         **given(options))

    from_optional = classmethod(lambda cls, **values: cls(**values))


class LLM(nanoengine.LLM):
    """nanoengine's `LLM`. None stands for the default of an option.

    num_gpu_blocks_override: `num_kv_blocks`.
    async_scheduling: `run_ahead`.
    disable_log_stats: changes nothing, since outputs always have metrics.
    speculative_config: {"method": "ngram", …} stands for speculation="prompt-lookup", which decides
        by itself how many guesses are worth checking.
    generation_config: "vllm" ignores the sampling parameters of the model's file.
    override_generation_config: default sampling parameters, by their names in this file.

    Raises ValueError for other values.
    """

    def __init__(self, model: Any, *, num_gpu_blocks_override: int | None = None,
                 speculative_config: Any = None, generation_config: str | None = None,
                 override_generation_config: dict[str, Any] | None = None,
                 async_scheduling: bool | None = None, disable_log_stats: bool | None = None,
                 **options: Any) -> None:
        if generation_config not in (None, "auto", "vllm"):
            raise rejected("generation_config", generation_config, "'auto' or 'vllm'")
        if speculative_config:
            # the method is in `model` in older versions
            method = speculative_config.get("method") or speculative_config.get("model")
            if "ngram" not in str(method):
                raise rejected("speculative_config", speculative_config, "{'method': 'ngram'}")
            options["speculation"] = "prompt-lookup"
        if num_gpu_blocks_override is not None:
            options["num_kv_blocks"] = num_gpu_blocks_override
        if async_scheduling is not None:
            options["run_ahead"] = async_scheduling
        super().__init__(model, **given(options))
        old = {} if generation_config == "vllm" else vars(self.inputs.default_params)
        new = dict(override_generation_config or {})
        if "max_new_tokens" in new:
            new["max_tokens"] = new.pop("max_new_tokens")
        self.inputs.default_params = SamplingParams(**old | new)

    def generate(self, prompts: Any, sampling_params: Any = None, use_tqdm: Any = True,
                 priority: Any = None, **options: Any) -> list[Any]:
        """Generates as nanoengine does."""
        return super().generate(
            plain(prompts), sampling_params, use_tqdm, priority, **given(options))

    def chat(self, messages: Any, *arguments: Any, **options: Any) -> list[Any]:
        """Answers as nanoengine does."""
        return super().chat(messages, *arguments, **given(options))

    def beam_search(self, prompts: Any, params: Any, *, use_tqdm: Any = False,
                    concurrency_limit: int | None = None, **options: Any) -> list[Any]:
        """Searches as nanoengine does. The other arguments change nothing: it shows no progress
        bar, and `max_num_seqs` limits how many beams run at once."""
        return super().beam_search(plain(prompts), params, **given(options))

    def get_metrics(self) -> list[Any]:
        """Returns `metrics()` as objects with a `name` like vLLM's, and a `value`."""
        return [SimpleNamespace(name=f"vllm:{METRIC_NAMES.get(name, name)}", value=n)
                for name, n in self.metrics().items()]


# RequestOutput, BeamSearchParams and others
__getattr__ = nanoengine.__getattr__
