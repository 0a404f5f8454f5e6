"""The results for a user: `RequestOutput`, `CompletionOutput`, and the request that makes them.

The text of a completion is made once it has ended. nanoengine_extensions/texts.py makes it while it
is generated.
"""

from dataclasses import dataclass, field
from typing import Any

from nanoengine.sequence import Sequence


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    index: which of the n completions it is, from 0.
    text: the text so far; empty where detokenize is False or there is no tokenizer. Without
        texts.py, it is empty until the completion has ended.
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
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
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
    num_cached_tokens: how many tokens of the prompt the prefix cache had; metrics.py says it.
    metrics: the timings of this request, a `RequestMetrics`: see nanoengine_extensions/metrics.py.
    index: which of the call's prompts it is, from 0.
    prompt_logprobs: such a dict for each token of the prompt, None for the first; None if not asked
        for, and for a request that ended in an error.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: Any = None
    index: int = 0
    prompt_logprobs: list[Any] | None = None


@dataclass(eq=False, repr=False)
class Request:
    """A prompt in the engine, and its completions.

    prompt: the text, None where only token ids were given.
    seqs: a sequence for each completion.
    tokenizer: turns tokens into text in the end; None where texts.py does it, or for a model
        without one.
    index: which of the call's prompts it is.
    features: fill in its outputs: `Features`.
    inbox: the requests of its call that have new tokens, until the call has seen them.
    """

    prompt: str | None
    seqs: list[Sequence]
    tokenizer: Any = None
    index: int = 0
    features: dict[str, Any] = field(default_factory=dict)
    inbox: dict[str, "Request"] = field(default_factory=dict)

    seq = property(lambda self: self.seqs[0])
    request_id = property(lambda self: self.seq.request_id)
    is_finished = property(lambda self: all(seq.finish_reason for seq in self.seqs))
    # what its call has to raise
    error = property(lambda self: next((seq.error for seq in self.seqs if seq.error), None))

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
        output = RequestOutput(
            seq.request_id, self.prompt, seq.token_ids[:seq.num_prompt_tokens],
            [self._completion(each) for each in self.seqs], self.is_finished,
            index=self.index)
        for feature in self.features.values():
            feature.output(self.seqs, output)
        return output

    def _completion(self, seq: Sequence) -> CompletionOutput:
        # an interrupted step can leave a pending token
        token_ids = seq.token_ids[seq.num_prompt_tokens:seq.num_known_tokens]
        text = ""
        if self.tokenizer and seq.finish_reason:
            text = text_of(seq, self.tokenizer.backend_tokenizer)
        return CompletionOutput(
            seq.index, text, token_ids, None, None, seq.finish_reason, seq.stop_reason)


def text_of(seq: Sequence, tokenizer: Any) -> str:
    """Returns the text of a completion that has ended, without the token that has ended it.

    It is what its tokens add to the text of the prompt: some decoders strip a space where a text
    begins.
    """
    end = seq.num_known_tokens - (seq.finish_reason == "stop")
    prompt = tokenizer.decode(seq.token_ids[:seq.num_prompt_tokens])
    return tokenizer.decode(seq.token_ids[:end])[len(prompt):]
