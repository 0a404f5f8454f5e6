"""What a user gets back: `RequestOutput`, `CompletionOutput`, and the text in them.

Text is made token by token with the tokenizers library's `DecodeStream`, which holds bytes back
until they are a whole character.
"""

from dataclasses import dataclass
from io import StringIO
from typing import Any

from tokenizers.decoders import DecodeStream

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
        self.prompt_token_ids = seq.token_ids[:]
        self.seq = seq
        self.text = StringIO()  # appending to it is O(1)
        self.longest_stop = max(map(len, seq.params.stop), default=1)
        self.tokenizer: Any = tokenizer and tokenizer.backend_tokenizer  # None: no text is wanted
        if self.tokenizer:  # begin in the prompt, so that the first token is decoded in its context
            suffixes = (self.prompt_token_ids[-length:] for length in range(4, 24))
            whole = (ids for ids in suffixes if "\ufffd" not in self.tokenizer.decode(ids))
            self.stream = DecodeStream(next(whole, []), seq.params.skip_special_tokens)

    def update(self, logprobs: Logprobs | None) -> str | None:
        """Takes in the newest token; returns the stop string that its text completes, if any."""
        seq, params = self.seq, self.seq.params
        if logprobs is not None:
            for token_id, found in logprobs.items():
                found.decoded_token = self.tokenizer and self.tokenizer.decode([token_id], False)
            seq.logprobs.append(logprobs)
        is_text = seq.finish_reason != "stop" or params.include_stop_str_in_output
        length = self.text.tell()
        if self.tokenizer and is_text:  # the token that ends a sequence is none
            self.text.write(self._decode(seq.token_ids[-1]))
        if not params.stop or seq.num_tokens - seq.num_prompt_tokens <= params.min_tokens:
            return None
        return self._find_stop(length)

    def _decode(self, token_id: int) -> str:
        """The text that a token completes: none in the middle of a character."""
        try:
            return self.stream.step(self.tokenizer, token_id) or ""
        except Exception as error:
            # The decoder would take back text that it has given out. That cannot be undone: the
            # text goes on with this token, as in vLLM.
            if "Invalid prefix" not in str(error):
                raise
            self.stream = DecodeStream([], self.seq.params.skip_special_tokens)
            return self.stream.step(self.tokenizer, token_id) or ""

    def _find_stop(self, length: int) -> str | None:
        """Of the stop strings that end behind `length`, the one that begins first; cuts there."""
        params = self.seq.params
        start = self.text.seek(max(0, length - self.longest_stop + 1))
        tail = self.text.read()
        new = length - start  # where the newest text begins in there
        found = ((tail.find(stop, max(0, new - len(stop) + 1)), stop) for stop in params.stop)
        index, stop = min((match for match in found if match[0] >= 0), default=(0, None))
        if stop is not None:
            cut = start + index + (len(stop) if params.include_stop_str_in_output else 0)
            self.text.truncate(self.text.seek(cut))
        return stop

    def output(self) -> CompletionOutput:
        """How it stands now; what may yet become a stop string is held back."""
        seq = self.seq
        text = self.text.getvalue()
        if not (seq.is_finished or seq.params.include_stop_str_in_output):
            text = text[:max(0, len(text) - self.longest_stop + 1)]
        token_ids = seq.token_ids[seq.num_prompt_tokens:]
        chosen = [found[token_id].logprob for found, token_id in zip(seq.logprobs, token_ids)]
        logprobs, cumulative = (seq.logprobs[:], sum(chosen)) if chosen else (None, None)
        return CompletionOutput(
            seq.index, text, token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason)


def request_output(completions: list[Completion]) -> RequestOutput:
    """A request as it stands now, from its completions in order."""
    first = completions[0]
    return RequestOutput(
        first.seq.request_id, first.prompt, first.prompt_token_ids,
        [completion.output() for completion in completions],
        all(completion.seq.is_finished for completion in completions),
        first.seq.metrics.num_cached_tokens, first.seq.metrics)
