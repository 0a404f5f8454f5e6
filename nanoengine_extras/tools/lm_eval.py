"""A model for lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness), `nanoengine`.

    python -m nanoengine eval --model_args pretrained=Qwen/Qwen3-0.6B --tasks arc_easy

    results = lm_eval.simple_evaluate(NanoengineLM("Qwen/Qwen3-0.6B", dtype="float32"), tasks=[…])

It tokenizes texts like the harness's model for transformers, `hf`, so that the results can be
compared. All choices of a question share its tokens in the prefix cache.
"""

import sys
from typing import Any

from nanoengine import LLM, SamplingParams

try:
    from lm_eval import utils
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
except ImportError as error:
    raise ValueError(f"eval needs lm-evaluation-harness ({error}): pip install lm-eval") from error


@register_model("nanoengine")
class NanoengineLM(TemplateLM):
    """An `LLM` with the methods that lm-evaluation-harness calls.

    pretrained: a folder or a Hugging Face id. batch_size, max_batch_size: have no effect, as the
    engine makes its own batches. device: as in `LLM`; the harness passes "cuda:0" if its user has
    named none, so that means the GPU if there is one. options: the other keywords of `LLM`.
    """

    # all tokens of a text come from one model
    backend = "causal"

    def __init__(self, pretrained: str = "", batch_size: Any = None, max_batch_size: Any = None,
                 device: str | None = None, **options: Any) -> None:
        super().__init__()
        if not pretrained:
            raise ValueError("pretrained is missing: give --model_args pretrained=MODEL")
        device = "auto" if device in (None, "cuda:0") else device
        self.llm = LLM(pretrained, device=device, **options)
        self.tokenizer: Any = self.llm.get_tokenizer()
        # the tokens of a window; the token after it is scored, too
        self.max_length = self.llm.inputs.max_model_len - 1

    # the harness uses it to name its cache of requests
    tokenizer_name = property(lambda self: self.llm.config.model.replace("/", "__"))
    eot_token_id = property(lambda self: self.tokenizer.eos_token_id)
    # what comes before a text without a context
    prefix_token_id = property(
        lambda self: self.eot_token_id if self.tokenizer.bos_token_id is None
        else self.tokenizer.bos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None,
                   **_: Any) -> list[int]:
        """Returns the tokens of a text. By default, they begin with BOS if the tokenizer adds it,
        but never twice."""
        if add_special_tokens is None:
            begin = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(begin)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens, verbose=False)

    def apply_chat_template(self, chat_history: list[dict[str, str]],
                            add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False,
                              **_: Any) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the likeliest."""
        pairs = []
        for _, context, continuation in requests:
            context = (context + continuation)[-self.max_length - 1:-len(continuation)]
            pairs.append((context, continuation[-self.max_length:]))
        contexts, continuations = zip(*pairs)
        scores = self.llm.score([*contexts], [[each] for each in continuations],
                                use_tqdm=not disable_tqdm)
        found = [(score.cumulative_logprob, {*score.ranks} == {1}) for score, in scores]
        for (texts, *_), result in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any],
                              disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows of the longest context."""
        places = []
        windows = []
        for place, request in enumerate(requests):
            token_ids = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(
                    token_ids, self.prefix_token_id, self.max_length, context_len=1):
                places.append(place)
                windows.append((None, *utils.make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for place, (logprob, _) in zip(places, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[place] += logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each prompt, up to a text in `until`."""
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        params = []
        for request in requests:
            # greedy, unless a task says otherwise
            given = {"temperature": 0.0} | normalize_gen_kwargs(request.args[1], 256)
            given.pop("do_sample", None)
            stop = handle_stop_sequences(given.pop("until", None), eos=None)
            params.append(SamplingParams(
                stop=[text for text in stop if text], max_tokens=given.pop("max_gen_toks"),
                truncate_prompt_tokens=-1, **given))
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def main(arguments: list[str] | None = None) -> None:
    """Starts lm-evaluation-harness on the command line, with this model."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.argv = ["lm_eval", "run", "--model", "nanoengine", *given]
    try:
        cli_evaluate()
    except OSError as error:
        raise ValueError(f"{error}: check the network, since the data of a task is downloaded when "
                         "it is first used; or give --tasks of which it is on disk") from error
    except ValueError as error:
        advice = "; `lm-eval ls tasks` lists those for --tasks" if "asks " in str(error) else ""
        raise ValueError(f"{error}{advice}") from error


if __name__ == "__main__":
    main()
