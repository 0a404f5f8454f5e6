"""What a user gets back: `RequestOutput`, `CompletionOutput`, and the text in them.

Text is made token by token, as in vLLM: a token adds what the tokenizer decodes more with it than
without it, in the context of the tokens before. Half a character is held back until it is whole.
"""

from dataclasses import dataclass, replace
from typing import Any

from nanoengine.sampler import Logprobs
from nanoengine.sampling_params import RequestOutputKind
from nanoengine.sequence import RequestMetrics, Sequence

# of the tokens in the middle of a character so many are decoded first
NUM_LAST = 8


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    finish_reason: "stop" (EOS, a stop token or string), "length", "error" (no token could be
        sampled), or None while it goes on.
    stop_reason: the stop string or token id that ended it, None for the tokenizer's EOS; what
        went wrong, after "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    index: which of the call's prompts it is, from 0; `request_id` counts over all calls.
    prompt_logprobs: for each token of the prompt, None for the first. None if not asked for, or
        after "error": which ones a NaN has reached depends on how the prompt was chunked.
    num_cached_tokens: how many tokens of the prompt the prefix cache had.
    lora_request: None; for scripts written for vLLM.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    index: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    lora_request: None = None


class Completion:
    """A sequence in the engine, and the text of it so far."""

    def __init__(self, seq: Sequence, tokenizer: Any) -> None:
        self.seq = seq
        self.text = ""
        has_text = tokenizer is not None and seq.params.detokenize
        self.tokenizer: Any = tokenizer.backend_tokenizer if has_text else None
        # the tokens before the next ones, which are decoded together with them
        self.context = seq.token_ids[-6:]
        # tokens in the middle of a character
        self.pending: list[int] = []
        # letters at the end that may yet become a stop string
        self.num_held = max(map(len, seq.params.stop), default=1) - 1

    def update(self) -> str | None:
        """Takes in the newest token; returns the stop string that its text completes, if any."""
        seq = self.seq
        num_generated = seq.num_tokens - seq.num_prompt_tokens
        unnamed = seq.logprobs[-1:]
        if num_generated == 1:
            unnamed += seq.prompt_logprobs.values()
        for token_id, found in [pair for logprobs in unnamed for pair in logprobs.items()]:
            found.decoded_token = self.tokenizer and self.tokenizer.decode([token_id], False)
        num_letters = len(self.text)
        # the token that ended it counts if stop strings do; a sequence with an error has no new one
        kept = "stop" if seq.params.include_stop_str_in_output else None
        if self.tokenizer and seq.finish_reason in (None, "length", kept):
            self.text += self._decode()
        return self._find_stop(num_letters) if num_generated > seq.params.min_tokens else None

    def _decode(self) -> str:
        """The text that the newest token completes: none in the middle of a character.

        Where many tokens complete none, the last ones are decoded first. A character that was cut
        in front of them leaves three letters at most: behind these, all is as in the whole text.
        """
        skip = self.seq.params.skip_special_tokens
        self.pending.append(self.seq.token_ids[-1])
        if len(self.pending) > NUM_LAST:
            if self.tokenizer.decode(self.pending[-NUM_LAST:], skip).endswith("\ufffd", 3):
                return ""
        before = self.tokenizer.decode(self.context, skip)
        after = self.tokenizer.decode(self.context + self.pending, skip)
        piece = after[len(before):]
        if piece.endswith("\ufffd"):
            return ""
        # a special token may have no text
        if piece:
            self.context = self.pending
        self.pending = []
        return piece

    def _find_stop(self, num_letters: int) -> str | None:
        """Of the stop strings that end behind so many letters the one that ends first, or stands
        first in the list; cuts the text there."""
        params = self.seq.params
        for end in range(num_letters + 1, len(self.text) + 1):
            for stop in params.stop:
                if self.text.endswith(stop, 0, end):
                    cut = 0 if params.include_stop_str_in_output else len(stop)
                    self.text = self.text[:end - cut]
                    return stop
        return None

    def output(self) -> CompletionOutput:
        """The completion as it stands now; what may yet become a stop string is held back."""
        seq = self.seq
        is_whole = seq.finish_reason or seq.params.include_stop_str_in_output
        text = self.text if is_whole else self.text[:max(0, len(self.text) - self.num_held)]
        token_ids = seq.token_ids[seq.num_prompt_tokens:]
        chosen = [found[token_id].logprob for found, token_id in zip(seq.logprobs, token_ids)]
        logprobs, cumulative = (seq.logprobs[:], sum(chosen)) if chosen else (None, None)
        return CompletionOutput(
            seq.index, text, token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason)


@dataclass
class Request:
    """A prompt in the engine, and its completions.

    prompt: the text, None where only token ids were given.
    index: which of the call's prompts it is.
    """

    prompt: str | None
    completions: list[Completion]
    index: int = 0

    seq = property(lambda self: self.completions[0].seq)
    is_shown_early = property(
        lambda self: self.seq.params.output_kind != RequestOutputKind.FINAL_ONLY)
    is_finished = property(lambda self: all(c.seq.finish_reason for c in self.completions))

    def update(self, seq: Sequence) -> str | None:
        """Takes in the newest token of a completion; returns a stop string that it completes."""
        return self.completions[seq.index].update()

    def output(self) -> RequestOutput:
        """The request as it stands now."""
        seq = self.seq
        prompt_logprobs = None
        if seq.params.prompt_logprobs is not None and seq.finish_reason != "error":
            prompt_logprobs = [seq.prompt_logprobs.get(i) for i in range(seq.num_prompt_tokens)]
        return RequestOutput(
            seq.request_id, self.prompt, seq.token_ids[:seq.num_prompt_tokens],
            [completion.output() for completion in self.completions], self.is_finished,
            seq.metrics.num_cached_tokens, replace(seq.metrics), self.index, prompt_logprobs)
