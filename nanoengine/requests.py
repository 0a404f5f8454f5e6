"""`Request`: a prompt in the engine, from a user's input to the results.

`InputProcessor` turns prompts and parameters into requests. A whole call is checked before any of
it is queued. These checks need the model's vocabulary, its tokenizer or the size of the cache; no
step runs here.

`Request.output` makes a `RequestOutput`. A completion gets its text once it has
ended or, with nanoengine_extras/sampling/texts.py, as its tokens arrive.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nanoengine.config import EngineConfig
from nanoengine.errors import also_check, naming
from nanoengine.features import asked_by, part
from nanoengine.loader import Tokenizer, find_folder, load_eos, load_tokenizer
from nanoengine.observers import Features
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence, hash64


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    index: which of the n completions it is, from 0.
    text: the text so far; empty if detokenize is False or there is no tokenizer. Without texts.py,
        it is empty until the completion has ended.
    token_ids: the generated tokens.
    cumulative_logprob: the sum of the log-probabilities of the tokens; None unless `logprobs`
        asked for them.
    logprobs: for each token, a dict from token ids to `Logprob` (logprob, rank, decoded_token);
        None if cumulative_logprob is None.
    finish_reason: "stop" (EOS, a stop token or string), "length", "abort", "error" (no token could
        be sampled), or None until it ends.
    stop_reason: the stop string or token id that ended it, None for the tokenizer's EOS; after
        "error", the cause.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    request_id: the number of the request, counted over all calls, as a string.
    prompt: the text of the prompt; None if only token ids were given.
    prompt_token_ids: the tokens of the prompt.
    outputs: a `CompletionOutput` for each completion.
    finished: whether all completions have ended.
    num_cached_tokens: how many tokens of the prompt came from the prefix cache; metrics.py sets it.
    metrics: the timings of this request, a `RequestMetrics`: see
        nanoengine_extras/running/metrics.py.
    index: which of the call's prompts it is, from 0.
    prompt_logprobs: for each token of the prompt, a dict as in `CompletionOutput.logprobs`, and
        None for the first token. None instead of the list if it was not asked for, or if the
        request ended in an error.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = None
    index: int = 0
    prompt_logprobs: list | None = None


@dataclass(eq=False, repr=False)
class Request:
    """A prompt in the engine, and its completions.

    prompt: the text, None if only token ids were given.
    seqs: a sequence for each completion.
    index: which of the call's prompts it is.
    inputs: the `InputProcessor` that made it.
    """

    prompt: str | None
    seqs: list[Sequence]
    index: int = 0
    inputs: Any = None

    seq = property(lambda self: self.seqs[0])
    request_id = property(lambda self: self.seq.request_id)
    is_finished = property(lambda self: all(seq.finish_reason for seq in self.seqs))
    # the error that its call must raise
    error = property(lambda self: next((seq.error for seq in self.seqs if seq.error), None))

    def output(self) -> RequestOutput:
        """Returns the output of the request so far."""
        token_ids = self.seq.token_ids[:self.seq.num_prompt_tokens]
        outputs = [self._completion(each) for each in self.seqs]
        output = RequestOutput(self.request_id, self.prompt, token_ids, outputs,
                               self.is_finished, index=self.index)
        self.inputs.features.call("output", self.seqs, output)
        return output

    def _completion(self, seq: Sequence) -> CompletionOutput:
        # an interrupted step can leave a pending token
        token_ids = seq.token_ids[seq.num_prompt_tokens:seq.num_known_tokens]
        text = self.inputs.text_of(seq) if seq.finish_reason else ""
        return CompletionOutput(
            seq.index, text, token_ids, None, None, seq.finish_reason, seq.stop_reason)


# --------------------------------------------------------------------------------- a user's input


Prompts = str | dict | list | tuple
Params = SamplingParams | list[SamplingParams] | None


def one_for_each(given: object, count: int) -> list:
    """Returns a list of `count` values: the given list, or one value for all."""
    return [*given] if isinstance(given, (list, tuple)) else [given] * count


class InputProcessor:
    """Makes requests for one engine.

    tokenizer: the transformers tokenizer, None for a model without one.
    max_model_len: the most tokens that prompt and output can have together; `LLM` sets it once the
        size of the cache is known.
    default_params: the parameters that `sampling_params=None` stands for.
    eos_tokens: the tokens that end every sequence, unless it ignores EOS, each with its
        `stop_reason`.
    numbers: an iterator over the numbers of the next requests.

    Raises ValueError for a tokenizer, or a generation_config.json, that cannot be used.
    """

    max_model_len: int

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 features: Features) -> None:
        self.config = config
        self.features = features
        self.vocab_size = model_config.vocab_size
        find = part("find_model", None, find_folder)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(
            find(config.tokenizer or folder, config, "tokenizer"))
        # generation_config.py, a feature, reads the file of this name
        self.default_params = part("default_params", config, lambda _: SamplingParams())(folder)
        # texts.py makes texts while tokens arrive
        self.text_of = part("text_of", config, self.text_of_ended)
        self.eos_tokens = load_eos(folder, model_config, self.tokenizer)
        self.numbers = count()

    # a copy: a user's call with truncation=True changes the tokenizer itself
    tokenizer_of_user = cached_property(lambda self: deepcopy(self.get_tokenizer()))

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ValueError if the model has none."""
        if self.tokenizer:
            return self.tokenizer
        raise ValueError("there is no tokenizer: give token ids, or LLM(tokenizer=…)")

    def make_requests(self, prompts: Prompts, params: Params,
                      priority: object = None) -> list[Request]:
        """Returns a request for each prompt; the arguments are those of `LLM.generate`.

        Raises ValueError for bad input, with its name, its value and what is accepted.
        """
        also_check("call", prompts, params, priority, self)
        if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
            prompts = [prompts]
        all_params = one_for_each(self.default_params if params is None else params, len(prompts))
        priorities = one_for_each(priority or 0, len(prompts))
        checked: list[tuple] = []
        for each, given, rank in zip(prompts, all_params, priorities, strict=True):
            # checked again; later changes by the user have no effect here
            own = given.clone()
            checked.append((*self.parse(f"prompts[{len(checked)}]", each, own), own, rank))
        # a call refused before this line uses no request ids
        return [self._request_of(place, *each) for place, each in enumerate(checked)]

    def check_vocabulary(self, name: str, token_ids: list | dict | tuple) -> None:
        """Raises ValueError for a token id outside the vocabulary."""
        last = self.vocab_size - 1
        if unknown := [each for each in token_ids if not 0 <= each <= last]:
            raise ValueError(f"{name}: token id {unknown[0]!r} is out of vocabulary, 0 to {last}")

    def parse(self, name: str, prompt: Prompts,
              params: SamplingParams) -> tuple[str | None, list[int]]:
        """Returns the text of a prompt, if there is one, and its token ids, truncated if asked."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text = prompt.get("prompt")
        token_ids = prompt.get("prompt_token_ids")
        with naming(name):
            if token_ids is None:
                token_ids = self.get_tokenizer().encode(text, verbose=False)
            # Python's integers, not NumPy's
            token_ids = [*map(index, token_ids)]
        self.check_vocabulary(name, token_ids)
        most = self.max_model_len
        if params.truncate_prompt_tokens is not None:
            token_ids = part("truncate", params, None)(token_ids, params, most)
        if not 0 < len(token_ids) < most:
            # in vLLM's words, which scripts may look for
            raise ValueError(f"{name} has {len(token_ids)} tokens: it must have 1 to {most - 1}: a "
                             "decoder prompt cannot be empty, and the context length is only "
                             f"{most} (the maximum context length is max_model_len={most})")
        return text, token_ids

    def _request_of(self, place: int, text: str | None, token_ids: list[int],
                    params: SamplingParams, priority: int) -> Request:
        """Returns a request with the sequence of its first completion, and forks for the others."""
        self.features.load(asked_by(params))
        number = next(self.numbers)
        longest = min(len(token_ids) + (params.max_tokens or 2**31), self.max_model_len)
        eos = {} if params.ignore_eos else self.eos_tokens
        ends = {token: token for token in params.stop_token_ids} | eos
        seed = params.seed
        if seed is None or seed == -1:
            seed = hash64(self.config.seed, number)
        seq = Sequence(
            str(number), token_ids, len(token_ids), longest, params, seed, ends, priority)
        # ~seed, since hash64(seed, i) is the draw at position i
        seq.forks = [seq.fork(seed=hash64(~seed, i), index=i) for i in range(1, params.n)]
        seqs = [seq, *seq.forks]
        self.features.call("enter", seqs, self)
        return Request(text, seqs, place, self)

    def text_of_ended(self, seq: Sequence) -> str:
        """Returns the text that the tokens of a completion add to its prompt, without the token
        that ended it; some decoders strip a text's first space, so it is not decoded alone."""
        if not self.tokenizer:
            return ""
        end = seq.num_known_tokens - (seq.finish_reason == "stop")
        decode = self.tokenizer.backend_tokenizer.decode
        prompt = decode(seq.token_ids[:seq.num_prompt_tokens])
        return decode(seq.token_ids[:end])[len(prompt):]
