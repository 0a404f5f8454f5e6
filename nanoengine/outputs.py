"""What a user gets back: `RequestOutput`, `CompletionOutput`, and the text in them.

Text is made token by token, as in vLLM: a token adds what the tokenizer decodes more with it than
without, in the context of the tokens before; half a character is held back until it is whole.
"""

from dataclasses import dataclass
from typing import Any

from nanoengine.sampler import Logprobs
from nanoengine.sequence import RequestMetrics, Sequence


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    finish_reason: "stop" (EOS, a stop token or string), "length", or None while it goes on.
    stop_reason: the stop string or token id that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions; the prefix cache had `num_cached_tokens` of the prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


class Completion:
    """A sequence in the engine, the prompt that it completes, and the text of it so far."""

    def __init__(self, prompt: str | None, seq: Sequence, tokenizer: Any) -> None:
        self.prompt = prompt
        self.seq = seq
        self.pieces: list[str] = []  # of its text, none of them empty
        self.longest_stop = max(map(len, seq.params.stop), default=1)
        wants_text = tokenizer and seq.params.detokenize
        self.tokenizer: Any = tokenizer.backend_tokenizer if wants_text else None
        self.context = seq.token_ids[-6:]  # the tokens before, that the next are decoded with
        self.pending: list[int] = []  # tokens in the middle of a character

    def update(self, seq: Sequence, logprobs: Logprobs | None) -> str | None:
        """Takes in the newest token; returns the stop string that its text completes, if any."""
        if logprobs is not None:
            for token_id, found in logprobs.items():
                found.decoded_token = self.tokenizer and self.tokenizer.decode([token_id], False)
            seq.logprobs.append(logprobs)
        is_text = seq.finish_reason != "stop" or seq.params.include_stop_str_in_output
        piece = self._decode() if self.tokenizer and is_text else ""  # the end is no text
        self.pieces += [piece] if piece else []
        num_generated = seq.num_tokens - seq.num_prompt_tokens
        return self._find_stop(len(piece)) if num_generated > seq.params.min_tokens else None

    def _decode(self) -> str:
        """The text that the newest token completes: none in the middle of a character."""
        skip = self.seq.params.skip_special_tokens
        self.pending.append(self.seq.token_ids[-1])
        before = self.tokenizer.decode(self.context, skip)
        piece = self.tokenizer.decode(self.context + self.pending, skip)[len(before):]
        if piece.endswith("\ufffd"):
            return ""
        self.context = self.pending if piece else self.context  # a special token has no text
        self.pending = []
        return piece

    def _find_stop(self, new: int) -> str | None:
        """Of the stop strings that end in the `new` last letters the first; cuts the text there."""
        params = self.seq.params
        tail = "".join(self.pieces[-self.longest_stop:])
        starts = [(tail.find(stop, 1 - new - len(stop)), stop) for stop in params.stop if new]
        index, stop = min((match for match in starts if match[0] >= 0), default=(0, None))
        if stop is not None:
            end = index + len(stop) * params.include_stop_str_in_output
            self.pieces[-self.longest_stop:] = [tail[:end]]
        return stop

    def output(self) -> CompletionOutput:
        """How it stands now; what may yet become a stop string is held back."""
        seq = self.seq
        text = "".join(self.pieces)
        if not (seq.finish_reason or seq.params.include_stop_str_in_output):
            text = text[:max(0, len(text) - self.longest_stop + 1)]
        token_ids = seq.token_ids[seq.num_prompt_tokens:]
        chosen = [found[token_id].logprob for found, token_id in zip(seq.logprobs, token_ids)]
        logprobs, cumulative = (seq.logprobs[:], sum(chosen)) if chosen else (None, None)
        return CompletionOutput(
            seq.index, text, token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason)


def request_output(completions: list[Completion]) -> RequestOutput:
    """A request as it stands now, from its completions in order."""
    prompt, seq = completions[0].prompt, completions[0].seq
    outputs = [completion.output() for completion in completions]
    return RequestOutput(
        seq.request_id, prompt, seq.token_ids[:seq.num_prompt_tokens], outputs,
        all(output.finish_reason for output in outputs), seq.metrics.num_cached_tokens, seq.metrics)
