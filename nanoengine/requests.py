"""`InputProcessor`: a user's prompts and parameters, checked, as requests with their sequences.

A call is checked whole before any of it is queued. Here are the checks that need the model's
vocabulary, its tokenizer or the size of the cache; nothing here runs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from nanoengine.config import EngineConfig
from nanoengine.outputs import Completion, Request
from nanoengine.sampler import encode_bad_words, hash64
from nanoengine.sampling_params import SamplingParams, naming, rejected
from nanoengine.sequence import Sequence


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text, if given, is only handed back."""

    prompt_token_ids: list[int]
    prompt: str


Prompts = str | dict[str, Any] | TextPrompt | TokensPrompt | list[Any]
Params = SamplingParams | list[SamplingParams] | None
TEXT_PARTS = ("text", "input_text", "output_text")
ACCEPTED_PROMPTS = (
    "a text, a list of token ids, {'prompt': …}, {'prompt_token_ids': …}, or a list of these")


@dataclass
class InputProcessor:
    """Makes requests for one engine.

    tokenizer: the transformers tokenizer, None for a model without one.
    max_model_len: the most tokens of prompt and output together.
    default_params: what `sampling_params=None` stands for.
    eos_tokens: the tokens that end every sequence, unless it ignores EOS, each with the
        `stop_reason` that it gives.
    num_requests: how many were made: the next one gets this number.
    """

    config: EngineConfig
    tokenizer: Any
    vocab_size: int
    max_model_len: int
    default_params: SamplingParams
    eos_tokens: dict[int, int | None]
    num_requests: int = 0

    def get_tokenizer(self) -> Any:
        """The tokenizer. Raises ValueError where the model has none."""
        if self.tokenizer is None:
            raise rejected("tokenizer", None, "given for texts, stop strings and bad_words: there "
                           "is none in the model's folder, or `skip_tokenizer_init=True`")
        return self.tokenizer

    def make_requests(self, prompts: Any, params: Any, priority: Any = None) -> list[Request]:
        """One request for each prompt; the arguments are those of `LLM.generate`.

        Raises ValueError for bad input, with its name, its value and what is accepted.
        """
        if not isinstance(prompts, (str, dict, list, tuple)):
            raise rejected("prompts", prompts, ACCEPTED_PROMPTS)
        are_ids = len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)
        if are_ids or isinstance(prompts, (str, dict)):
            prompts = [prompts]
        params = one_for_each(len(prompts), "sampling_params", params, self.default_params)
        priorities = one_for_each(len(prompts), "priority", priority, 0)
        if len(set(priorities)) > 1 and self.config.scheduling_policy == "fcfs":
            raise rejected("priority", priority,
                           "the same for all unless scheduling_policy is 'priority'")
        requests = list(map(self._make_request, range(len(prompts)), prompts, params, priorities))
        self.num_requests += len(requests)
        return requests

    def _make_request(self, index: int, prompt: Any, params: Any, priority: int) -> Request:
        """Checks one prompt and its parameters against model, tokenizer and cache."""
        # a copy: what the user changes later changes nothing here
        params = params.clone()
        tokenizer = self.get_tokenizer() if params.stop or params.bad_words else self.tokenizer
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            self._check_vocabulary(name, getattr(params, name) or ())
        most = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name) or 0
            if most >= 0 and not 0 <= count <= most:
                raise rejected(name, count, f"from 0 to max_logprobs={most}")
        text, token_ids = self._parse_prompt(f"prompts[{index}]", prompt)

        number = self.num_requests + index
        length = len(token_ids)
        longest = min(length + (params.max_tokens or self.max_model_len), self.max_model_len)
        stop_tokens: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        end_tokens = stop_tokens | self.eos_tokens
        seed = hash64(self.config.seed, number) if params.seed is None else params.seed
        seq = Sequence(str(number), token_ids, length, longest, params, seed,
                       stop_tokens if params.ignore_eos else end_tokens, [*end_tokens],
                       encode_bad_words(params, tokenizer, self.vocab_size), priority,
                       needs_tokens=bool(params.bad_words or params.logits_processors))
        seq.is_scored = params.prompt_logprobs is not None and length > 1
        seq.forks = [seq.fork(seed=hash64(~seq.seed, i), index=i) for i in range(1, params.n)]
        completions = [Completion(each, tokenizer) for each in (seq, *seq.forks)]
        return Request(text, completions, index)

    def render(self, messages: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
        """One conversation or a list of them, as prompts, by the tokenizer's chat template.

        options: of transformers' `apply_chat_template`, and what the template itself asks for.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, list) or not messages:
            raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
        chats = messages if isinstance(messages[0], list) else [messages]
        with naming("messages"):
            chats = [[message | {"content": text_of(message.get("content"))} for message in chat]
                     for chat in chats]
            texts = tokenizer.apply_chat_template(chats, **options | {"tokenize": False})
            # The template has written the special tokens.
            ids = tokenizer(texts, add_special_tokens=False).input_ids
        return [{"prompt": text, "prompt_token_ids": token_ids}
                for text, token_ids in zip(texts, ids)]

    def _parse_prompt(self, name: str, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms, as its text (if there is one) and its token ids."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text = prompt.get("prompt")
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            with naming(name):
                token_ids = self.get_tokenizer().encode(text)
        is_known = prompt.keys() <= {"prompt", "prompt_token_ids"}
        if not is_known or not isinstance(token_ids, (list, tuple)):
            raise rejected(name, prompt, ACCEPTED_PROMPTS)
        self._check_vocabulary(name, token_ids)
        if not 0 < len(token_ids) < self.max_model_len:
            raise ValueError(f"{name} has {len(token_ids)} tokens: a decoder prompt cannot be "
                             f"empty, and must be shorter than max_model_len={self.max_model_len}")
        return text, list(map(int, token_ids))

    def _check_vocabulary(self, name: str, token_ids: Iterable[Any]) -> None:
        last = self.vocab_size - 1
        for token_id in token_ids:
            if not isinstance(token_id, Integral) or not 0 <= int(token_id) <= last:
                raise ValueError(f"{name}: token id {token_id!r} is out of vocabulary, 0 to {last}")


def text_of(content: Any) -> str:
    """The content of a message as one text; text parts are joined by newlines, as in vLLM."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = []
    for part in parts:
        is_text_part = isinstance(part, dict) and part.get("type") in TEXT_PARTS
        texts.append(part.get("text") if is_text_part else part)
        if not isinstance(texts[-1], str):
            raise rejected("content part", part, f"a text, or a text of a type in {TEXT_PARTS}")
    return "\n".join(texts)


def one_for_each(count: int, name: str, value: Any, default: Any) -> list[Any]:
    """One value for all prompts, a list of one for each, or None for the default, as a list."""
    kind = type(default)
    value = default if value is None else value
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count or not all(isinstance(item, kind) for item in values):
        raise rejected(name, value, f"one {kind.__name__}, or {count} of them")
    return values
