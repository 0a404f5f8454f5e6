"""The results for a user: `RequestOutput`, `CompletionOutput`, and their text.

Text is made token by token, as in vLLM: a token adds the difference between the decoded texts with
it and without it, in the context of the tokens before. Half a character is held back until it is
complete.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from nanoengine.sequence import Sequence


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    index: which of the n completions it is, from 0.
    text: the text so far; empty where detokenize is False or there is no tokenizer.
    token_ids: the generated tokens.
    cumulative_logprob: the sum of the log-probabilities of the tokens; None unless `logprobs`
        asked for them.
    logprobs: for each token, a dict from token ids to `Logprob` (logprob, rank, decoded_token);
        None likewise.
    finish_reason: "stop" (EOS, a stop token or string), "length", "abort", "error" (no token could
        be sampled), or None while it goes on.
    stop_reason: the stop string or token id that ended it, None for the tokenizer's EOS; after
        "error", what went wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Any] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions.

    request_id: a number that counts over all calls, as a text.
    prompt: the text of the prompt; None where only token ids were given.
    prompt_token_ids: the tokens of the prompt.
    outputs: a `CompletionOutput` for each completion.
    finished: whether all completions have ended.
    num_cached_tokens: how many tokens of the prompt the prefix cache had.
    metrics: the timings of this request, a `RequestMetrics` of the extensions; None without them.
    index: which of the call's prompts it is, from 0.
    prompt_logprobs: such a dict for each token of the prompt, None for the first; None if not asked
        for, and for a request that ended in an error.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: Any
    index: int = 0
    prompt_logprobs: list[Any] | None = None


class Completion:
    """A sequence in the engine, and its text so far."""

    def __init__(self, seq: Sequence, tokenizer: Any) -> None:
        self.seq = seq
        self.text = ""
        has_text = tokenizer is not None and seq.params.detokenize
        self.tokenizer: Any = tokenizer.backend_tokenizer if has_text else None
        # the tokens before the next ones, which are decoded together with them
        self.context = self._last_seen(seq.token_ids) if has_text else []
        # tokens whose text is not complete: they end in the middle of a character
        self.undecoded: list[int] = []
        # characters at the end that could become a stop string
        self.num_held_back = max(map(len, seq.params.stop), default=1) - 1

    def update(self) -> str | None:
        """Takes in the newest token; returns the stop string that its text completes, if any.

        The text then ends before the stop string, or after it if it is to be included."""
        seq = self.seq
        # there is no new token
        if seq.finish_reason == "error":
            return None
        num_seen = len(self.text)
        # an EOS or stop token adds its text only with include_stop_str_in_output
        adds_text = seq.finish_reason != "stop" or seq.params.include_stop_str_in_output
        if self.tokenizer and adds_text:
            self.text += self._decode()
        if seq.num_tokens - seq.num_prompt_tokens <= seq.params.min_tokens:
            return None
        # take the stop string that ends first in the new text, or is first in the list
        for end in range(num_seen + 1, len(self.text) + 1):
            for stop in seq.params.stop:
                if self.text.endswith(stop, 0, end):
                    cut = 0 if seq.params.include_stop_str_in_output else len(stop)
                    self.text = self.text[:end - cut]
                    return stop
        return None

    def _decode(self) -> str:
        """Returns the text that the newest tokens complete: none in the middle of a character."""
        skip = self.seq.params.skip_special_tokens
        self.undecoded.append(self.seq.token_ids[-1])
        # of many tokens only the last eight matter: if they begin within a character, their text
        # begins with at most three replacement characters, which do not count
        if len(self.undecoded) > 8:
            tail = self.tokenizer.decode(self.undecoded[-8:], skip)
            # or all are special tokens
            if not tail or tail[3:].endswith("\ufffd"):
                return ""
        before = self.tokenizer.decode(self.context, skip)
        piece = self.tokenizer.decode(self.context + self.undecoded, skip)[len(before):]
        if piece.endswith("\ufffd"):
            return ""
        if piece:
            self.context = self.undecoded
        elif not before:
            # a decoder can cut a space, but only the one at the beginning of a text
            self.context = self._last_seen(self.context + self.undecoded)
        self.undecoded = []
        return piece

    def _last_seen(self, token_ids: list[int]) -> list[int]:
        """Returns the last six tokens that the decoder sees; it can leave out special tokens."""
        skip = self.seq.params.skip_special_tokens
        decode = self.tokenizer.decode
        seen = (i for i in reversed(token_ids) if decode([i], skip) == decode([i], False))
        return [*islice(seen, 6)][::-1]

    def output(self) -> CompletionOutput:
        """Returns the completion so far, without characters that could become a stop string."""
        seq = self.seq
        is_whole = seq.finish_reason or seq.params.include_stop_str_in_output
        text = self.text if is_whole else self.text[:max(0, len(self.text) - self.num_held_back)]
        # an interrupted step can leave a pending token
        token_ids = seq.token_ids[seq.num_prompt_tokens:seq.num_known_tokens]
        return CompletionOutput(
            seq.index, text, token_ids, None, None, seq.finish_reason, seq.stop_reason)


@dataclass(eq=False, repr=False)
class Request:
    """A prompt in the engine, and its completions.

    prompt: the text, None where only token ids were given.
    index: which of the call's prompts it is.
    inbox: the requests of its call that have new tokens, until the call has seen them.
    """

    prompt: str | None
    completions: list[Completion]
    index: int = 0
    inbox: dict[str, "Request"] = field(default_factory=dict)

    seqs = property(lambda self: [completion.seq for completion in self.completions])
    seq = property(lambda self: self.completions[0].seq)
    request_id = property(lambda self: self.seq.request_id)
    is_finished = property(lambda self: all(seq.finish_reason for seq in self.seqs))

    def update(self, seq: Sequence) -> str | None:
        """Takes in the newest token of a completion; returns a stop string that it completes."""
        return self.completions[seq.index].update()

    def end(self, error: Exception | None = None) -> None:
        """Ends its unfinished completions, and tells its call; with an error, all completions."""
        for seq in self.seqs:
            if error or not seq.finish_reason:
                seq.finish_reason = "abort"
                seq.error = error
        self.inbox[self.request_id] = self

    def output(self) -> RequestOutput:
        """Returns the output of the request so far."""
        seq = self.seq
        outputs = [completion.output() for completion in self.completions]
        return RequestOutput(
            seq.request_id, self.prompt, seq.token_ids[:seq.num_prompt_tokens], outputs,
            self.is_finished, seq.num_cached_tokens or 0, None, self.index)
