"""`InputProcessor`: a user's prompts and parameters, checked, as requests with their sequences.

A whole call is checked before any of it is queued. These checks need the model's vocabulary, its
tokenizer or the size of the cache; no step runs here.
"""

from copy import deepcopy
from functools import cached_property
from itertools import count
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nanoengine.checks import naming, rejected
from nanoengine.config import EngineConfig
from nanoengine.features import extension, is_installed
from nanoengine.loader import find_model, load_eos, load_tokenizer
from nanoengine.observers import Feature
from nanoengine.outputs import Request
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence, hash64

Params = SamplingParams | list[SamplingParams] | None
# the text of a prompt, if there is one, and its token ids
Parsed = tuple[str | None, list[int]]


class InputProcessor:
    """Makes requests for one engine.

    tokenizer: the transformers tokenizer, None for a model without one.
    max_model_len: the most tokens of prompt and output together; `LLM` sets it once the size of the
        cache is known.
    default_params: what `sampling_params=None` stands for.
    eos_tokens: the tokens that end every sequence, unless it ignores EOS, each with its
        `stop_reason`.
    numbers: an iterator over the numbers of the next requests.

    Raises ValueError for a tokenizer, or a generation_config.json, that cannot be used.
    """

    max_model_len: int

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path,
                 features: dict[str, Feature]) -> None:
        self.config = config
        self.features = features
        self.vocab_size = model_config.vocab_size
        self.tokenizer: Any = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(find_model(
                config.tokenizer or folder, config.revision, config.download_dir, "tokenizer"))
        self.default_params = SamplingParams()
        if is_installed("generation_config"):
            self.default_params = extension("generation_config").load_defaults(folder)
        self.eos_tokens = load_eos(folder, model_config, self.tokenizer)
        self.numbers = count()

    # a copy: a call with truncation=True changes a tokenizer, also for other threads
    tokenizer_of_user = cached_property(lambda self: deepcopy(self.get_tokenizer()))

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer. Raises ValueError if the model has none."""
        if self.tokenizer is None:
            raise rejected("tokenizer", None, "given for texts, stop strings, bad_words, grammars: "
                           "its folder has none, or `skip_tokenizer_init=True`")
        return self.tokenizer

    def make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        """Returns a request for each prompt; the arguments are those of `LLM.generate`.

        Raises ValueError for bad input, with its name, its value and what is accepted.
        """
        if is_installed("strict"):
            extension("strict").check_call(prompts, params, priority, SamplingParams)
        if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
            prompts = [prompts]
        given = (self.default_params if params is None else params, priority or 0)
        lists = [each if isinstance(each, (list, tuple)) else [each] * len(prompts)
                 for each in given]
        parsed = [self.parse(f"prompts[{place}]", *each)
                  for place, each in enumerate(zip(prompts, lists[0]))]
        # only now, so that a refused call uses up no numbers (but features can refuse more)
        checked = [*zip(range(len(prompts)), parsed, *lists, strict=True)]
        # one for all
        inbox: dict[str, Request] = {}
        return [self._request_of(inbox, *each) for each in checked]

    def check_vocabulary(self, name: str, token_ids: Any) -> None:
        """Raises ValueError for a token id out of the vocabulary."""
        last = self.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= last:
                raise ValueError(f"{name}: token id {token_id!r} is out of vocabulary, 0 to {last}")

    def parse(self, name: str, prompt: Any, params: SamplingParams) -> Parsed:
        """Returns the text and the token ids of a prompt in any form, truncated if asked."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids = map(prompt.get, ("prompt", "prompt_token_ids"))
        with naming(name):
            if token_ids is None:
                token_ids = self.get_tokenizer().encode(text, verbose=False)
            # integers of Python
            token_ids = [*map(index, token_ids)]
        self.check_vocabulary(name, token_ids)
        most = self.max_model_len
        given = params.truncate_prompt_tokens
        if given is not None:
            kept = given if given >= 0 else most - (params.max_tokens or 1)
            if kept < 1:
                raise rejected("truncate_prompt_tokens", given,
                               f"at least 1, or -1 with max_tokens below max_model_len={most}")
            token_ids = token_ids[-kept:]
        if not 0 < len(token_ids) < most:
            raise ValueError(
                f"{name} has {len(token_ids)} tokens: a decoder prompt cannot be empty and must be "
                f"shorter than max_model_len={most}, as the maximum context length is only {most}")
        return text, token_ids

    def _request_of(self, inbox: dict[str, Request], place: int, prompt: Parsed,
                    params: SamplingParams, priority: int) -> Request:
        """Returns a request with the sequence of its first completion, and forks for the others."""
        text, token_ids = prompt
        self.check_vocabulary("stop_token_ids", params.stop_token_ids)
        # later changes by the user have no effect here
        params = params.clone()
        number = next(self.numbers)
        longest = min(len(token_ids) + (params.max_tokens or 2**31), self.max_model_len)
        ends: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        if not params.ignore_eos:
            ends |= self.eos_tokens
        seed = hash64(self.config.seed, number) if params.seed in (None, -1) else params.seed
        seq = Sequence(
            str(number), token_ids, len(token_ids), longest, params, seed, ends, priority)
        # ~seed, since hash64(seed, i) is the draw at position i
        seq.forks = [seq.fork(seed=hash64(~seed, i), index=i) for i in range(1, params.n)]
        seqs = [seq, *seq.forks]
        for feature in self.features.values():
            feature.enter(seqs, self)
        return Request(text, seqs, self.tokenizer, place, self.features, inbox)
