"""`InputProcessor`: a user's prompts and parameters, checked, as requests with their sequences.

A whole call is checked before any of it is queued. These checks need the model's vocabulary, its
tokenizer or the size of the cache; no step runs here.
"""

from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nanoengine.config import EngineConfig
from nanoengine.loader import find_model, load_defaults, load_tokenizer
from nanoengine.outputs import Completion, Request
from nanoengine.sampling_params import SamplingParams
from nanoengine.seams import extension, naming, rejected
from nanoengine.sequence import Sequence, hash64

Params = SamplingParams | list[SamplingParams] | None
FORMS = "a text, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these"


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
    # the extensions replace it
    make_request: Any = Request

    def __init__(self, config: EngineConfig, model_config: PretrainedConfig, folder: Path) -> None:
        self.config = config
        self.vocab_size = model_config.vocab_size
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(find_model(
            config.tokenizer or folder, config.revision, config.download_dir, "tokenizer"))
        self.default_params, self.eos_tokens = load_defaults(folder, model_config, self.tokenizer)
        self.numbers = count()

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer. Raises ValueError if the model has none."""
        if self.tokenizer is None:
            raise rejected("tokenizer", None, "given for texts, stop strings, bad_words, grammars: "
                           "there is none in its folder, or `skip_tokenizer_init=True`")
        return self.tokenizer

    def make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        """Returns a request for each prompt; the arguments are those of `LLM.generate`.

        Raises ValueError for bad input, with its name, its value and what is accepted.
        """
        if isinstance(prompts, (str, dict)) or isinstance(next(iter(prompts), None), Integral):
            prompts = [prompts]
        params, priorities = (
            given if isinstance(given, list) else [given] * len(prompts)
            for given in (self.default_params if params is None else params, priority or 0))
        parsed = [self.parse(*each) for each in enumerate(prompts)]
        if any(each.stop for each in params):
            self.get_tokenizer()
        # only now, so that a refused call uses up no numbers (but a grammar is only refused below)
        checked = [*zip(range(len(prompts)), parsed, params, priorities, strict=True)]
        return [self._request_of(*each) for each in checked]

    def parse(self, index: int, prompt: Any) -> tuple[str | None, list[int]]:
        """Returns the text (if there is one) and the token ids of a prompt in any form."""
        name, most = f"prompts[{index}]", self.max_model_len
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids = map(prompt.get, ("prompt", "prompt_token_ids"))
        if token_ids is None and isinstance(text, str):
            with naming(name):
                token_ids = self.get_tokenizer().encode(text, verbose=False)
        if {*prompt} - {"prompt", "prompt_token_ids"} or not isinstance(token_ids, (list, tuple)):
            raise rejected(name, prompt, FORMS)
        if not 0 < len(token_ids) < most:
            raise ValueError(
                f"{name} has {len(token_ids)} tokens: a decoder prompt cannot be empty and must be "
                f"shorter than max_model_len={most}, as the maximum context length is only {most}")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{name}: token id {token_id} is out of vocabulary, "
                                 f"0 to {self.vocab_size - 1}")
        return text, list(map(int, token_ids))

    def _request_of(self, index: int, prompt: tuple[str | None, list[int]],
                    params: SamplingParams, priority: int) -> Request:
        """Returns a request with the sequence of its first completion, and forks for the others."""
        text, token_ids = prompt
        # later changes by the user have no effect here
        params = params.clone()
        number = next(self.numbers)
        longest = min(len(token_ids) + (params.max_tokens or 2**31), self.max_model_len)
        stops: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        ends = stops | self.eos_tokens
        seed = hash64(self.config.seed, number) if params.seed in (None, -1) else params.seed
        seq = Sequence(
            str(number), token_ids, len(token_ids), longest, params, seed,
            stops if params.ignore_eos else ends, priority)
        # ~seed, since hash64(seed, i) is the draw at position i
        seq.forks = [seq.fork(seed=hash64(~seed, i), index=i) for i in range(1, params.n)]
        seqs = [seq, *seq.forks]
        if "constraints" in params.edits:
            for each in seqs:
                extension("constraints").constrain(
                    each, list(ends), self.tokenizer, self.vocab_size)
        completions = [Completion(each, self.tokenizer) for each in seqs]
        return self.make_request(text, completions, index)
