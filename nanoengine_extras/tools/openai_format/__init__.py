"""OpenAI's format of completions and chats: bodies of requests, and answers.

serve.py and batch.py use it. Parameters are OpenAI's and vLLM's, such as `top_k` and `ignore_eos`;
null stands for the default. Parameters without an effect on the answer, such as `user`, are
accepted. `tools` and `reasoning_effort` go to the chat template; reasoning.py and tool_calls.py
find thoughts and calls in an answer.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanoengine.errors import naming, rejected
from nanoengine.features import extension, is_installed
from nanoengine_extras.tools.openai_format.logprobs import Tokens, of_chat, of_completion

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"

# the fields of a body
SAMPLING = {each.name for each in fields(SamplingParams)} - {
    "detokenize", "logits_processors", "prompt_logprobs", "prompt_logprobs_start"}
TEMPLATE = {"add_generation_prompt", "chat_template", "chat_template_kwargs",
            "continue_final_message", "tools"}
OF_CHATS = {"messages", "max_completion_tokens", "reasoning_effort", "tool_choice", "top_logprobs"}
OF_ALL = SAMPLING | {"response_format", "stream", "stream_options"}
KNOWN = {CHAT: OF_ALL | OF_CHATS | TEMPLATE, COMPLETION: OF_ALL | {"echo", "prompt"}}
# with the first two together, each chunk of a stream has the usage so far, as in vLLM
STREAMING = ["include_usage", "continuous_usage_stats", "include_obfuscation"]
IGNORED = {*"""cache_salt metadata model parallel_tool_calls prompt_cache_key request_id
    safety_identifier service_tier session_id spaces_between_special_tokens store user""".split()}
# the only value without an effect
NEUTRAL: dict[str, Any] = dict(
    best_of=1, include_reasoning=True, length_penalty=1.0, mm_payload="tensors", suffix="",
    modalities=["text"], thinking_token_budget=-1, tool_choice="none", truncation_side="left",
    **dict.fromkeys("""echo priority return_token_ids return_token_offsets return_weight_versions
    return_tokens_as_token_ids routed_experts_prompt_start use_beam_search""".split(), 0))


@dataclass(eq=False)
class Body:
    """The parameters of one request; `read` fills them in.

    url: CHAT or COMPLETION. name: ends the id of the answer.
    stream_options: those that are true, of STREAMING.
    echoes: the answer begins with the prompt. is_echo: it is the prompt alone.
    tokenizer: for the text of an echo, and the bytes of tokens.
    reasoning: finds thoughts in the choices, and calls the calls of tools.
    last: the newest output of each prompt. sent: how much of each choice the client was sent:
        characters, tokens, its finish_reason, and the length of its tokens' texts.
    """

    url: str
    name: str = field(default_factory=lambda: str(time.time_ns()))
    params: SamplingParams = field(default_factory=SamplingParams)
    prompts: list[Any] = field(default_factory=list)
    streams: bool = False
    stream_options: set[str] = field(default_factory=set)
    echoes: bool = False
    is_echo: bool = False
    tokenizer: Any = None
    reasoning: Any = None
    calls: Callable[[Iterable[dict[str, Any]]], Iterable[dict[str, Any]]] = iter
    last: dict[int, Any] = field(default_factory=dict)
    sent: dict[int, tuple[int, int, str | None, int]] = field(default_factory=dict)

    num_completions = property(lambda self: len(self.prompts) * self.params.n)

    # ----------------------------------------------------------------------------- reading

    def read(self, body: dict[str, Any], llm: LLM, finds_calls: bool = False) -> None:
        """Reads a body. Raises ValueError, whose message begins with the name of a parameter.

        finds_calls: whether to look for tool calls that a model writes by itself.
        """
        # null means the default
        body = {name: value for name, value in body.items() if value is not None}
        if self.url == CHAT and is_installed("models.generation_config"):
            body = extension("models.generation_config").of_chats(llm.model_config) | body
        # a chat template writes them itself
        neutral = NEUTRAL | {"add_special_tokens": self.url == COMPLETION}
        for name in body.keys() - KNOWN[self.url] - IGNORED:
            if name not in neutral or body[name] != neutral[name]:
                # vLLM's older names, such as guided_json
                known = "structured_outputs" if name.startswith("guided_") else name
                near = [] if name in neutral else get_close_matches(known, KNOWN[self.url], 1, 0.8)
                advice = f"the nearest is {near[0]}" if near else "omit it"
                raise ValueError(f"{name}={body[name]!r} is not supported by {self.url}: {advice}")
        options = body.get("stream_options", {})
        if not isinstance(options, dict) or options.keys() - STREAMING:
            raise rejected("stream_options", options, f"an object with {', '.join(STREAMING)}")
        self.stream_options = {name for name in STREAMING if flag_of(options, name)}
        self.streams, self.echoes = (flag_of(body, name) for name in ("stream", "echo"))
        if "stream_options" in body and not self.streams:
            raise rejected("stream_options", options, "left out without stream=true")
        self.params = self._sampling_params(body, llm.get_default_sampling_params())
        if self.url == CHAT:
            if body.keys() & {"tools", "tool_choice"}:
                extension("tools.tool_calls", "tools").read(self, body, finds_calls)
            given = {name: body[name] for name in TEMPLATE & body.keys()}
            further = body.get("chat_template_kwargs", {})
            if "reasoning_effort" in body and isinstance(further, dict):
                # as in vLLM: the first is a variable of templates such as gpt-oss's, the second of
                # those that only turn thinking on or off, such as Qwen3's
                given["chat_template_kwargs"] = {
                    "reasoning_effort": body["reasoning_effort"],
                    "enable_thinking": body["reasoning_effort"] != "none", **further}
            messages: Any = body.get("messages")
            self.prompts = extension("tools.chat").render(llm.inputs, [messages], **given)
            self.tokenizer = llm.get_tokenizer()
            if is_installed("tools.reasoning"):
                is_continued = given.get("continue_final_message", False)
                self.reasoning = extension("tools.reasoning").find(
                    self, is_continued, str(messages[-1].get("content")), self.tokenizer)
            return
        prompt: Any = body.get("prompt")
        if not isinstance(prompt, (str, list)) or prompt == []:
            raise ValueError("prompt must be a string, token ids or a list of these, not empty")
        are_several = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
        self.prompts = [*prompt] if are_several else [prompt]
        if self.echoes:
            self.tokenizer = llm.get_tokenizer()
            with naming("prompt"):
                self.prompts = [with_text(each, self.tokenizer) for each in self.prompts]

    def _sampling_params(self, body: Any, defaults: SamplingParams) -> SamplingParams:
        given = {"max_tokens": 16} | {name: body[name] for name in SAMPLING & body.keys()}
        if "logit_bias" in given:
            with naming(rejected("logit_bias", given["logit_bias"], "biases by token id")):
                given["logit_bias"] = {int(key): bias for key, bias in body["logit_bias"].items()}
        form = body.get("response_format", {"type": "text"})
        if not isinstance(form, dict) or form.get("type") != "text":
            if "structured_outputs" in given:
                raise ValueError("response_format must be left out with structured_outputs")
            given["structured_outputs"] = extension(
                "sampling.structured_outputs", "response_format").from_openai(form)
        if self.echoes:
            given["prompt_logprobs"] = body.get("logprobs")
            # the engine generates at least one token
            self.is_echo = given["max_tokens"] == 0
            given["max_tokens"] = 1 if self.is_echo else given["max_tokens"]
        if self.url == CHAT:
            # checked under these names too, so that an error names what the client sent
            for key, own in (("max_completion_tokens", "max_tokens"), ("top_logprobs", "logprobs")):
                with naming(key):
                    SamplingParams(**{own: body.get(key)})
            # None: as many as fit
            given["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens"))
            has_logprobs = flag_of(body, "logprobs")
            if body.get("top_logprobs") and not has_logprobs:
                raise ValueError("logprobs must be true for top_logprobs")
            given["logprobs"] = body.get("top_logprobs", 0) if has_logprobs else None
        return replace(defaults, **given)

    # ----------------------------------------------------------------------------- answers

    def edit(self, choices: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Yields the choices of a whole answer, or of an event, with thoughts and calls apart."""
        return self.calls(self.reasoning.edit(choices) if self.reasoning else choices)

    def response(self, outputs: list[RequestOutput], model: str) -> dict[str, Any]:
        """Returns the whole answer to one prompt or several.

        Raises RuntimeError for a completion that could not continue.
        """
        choices = [choice for output in sorted(outputs, key=lambda each: each.index)
                   for choice in self.edit(self.news(output))]
        return self.head(model) | {"choices": choices, "usage": self.usage()}

    def head(self, model: str) -> dict[str, Any]:
        """Returns the beginning of an answer, or of each chunk of a stream."""
        kind = "chat.completion" + ".chunk" * self.streams
        return {"id": f"cmpl-{self.name}", "created": int(time.time()), "model": model,
                "object": kind if self.url == CHAT else "text_completion"}

    def usage(self) -> dict[str, int]:
        """Returns how many tokens there are in the newest outputs."""
        outputs = self.last.values()
        counts = {"prompt_tokens": sum(len(each.prompt_token_ids) for each in outputs),
                  "completion_tokens": 0 if self.is_echo else sum(
                      len(completion.token_ids) for each in outputs for completion in each.outputs)}
        return counts | {"total_tokens": sum(counts.values())}

    def news(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yields the choices of an output with what is new in them: of a whole answer, all.

        Raises RuntimeError for a completion that could not continue.
        """
        self.last[output.index] = output
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise RuntimeError(completion.stop_reason)
            if self.is_echo:
                completion = CompletionOutput(completion.index, "", [], finish_reason="length")
            index = output.index * self.params.n + completion.index
            num_characters, num_tokens, reason, offset = self.sent.get(index, (0, 0, None, 0))
            text = (output.prompt or "") * self.echoes + completion.text
            echo = (output.prompt_logprobs or []) if self.echoes else []
            start = max(0, num_tokens - len(echo))
            tokens = [*zip(output.prompt_token_ids[num_tokens:], echo[num_tokens:]),
                      *zip(completion.token_ids[start:], (completion.logprobs or [])[start:])]
            if tokens or (len(text), completion.finish_reason) != (num_characters, reason):
                logprobs = self.logprobs(tokens, offset) if tokens else None
                offset += sum(map(len, (logprobs or {}).get("tokens", ())))
                content = self.content(text[num_characters:], index not in self.sent)
                self.sent[index] = (
                    len(text), num_tokens + len(tokens), completion.finish_reason, offset)
                yield content | {
                    "index": index, "logprobs": logprobs, "stop_reason": completion.stop_reason,
                    "finish_reason": completion.finish_reason}

    def content(self, text: str, is_first: bool) -> dict[str, Any]:
        """Returns the text of a choice, where a client expects it."""
        if self.url != CHAT:
            return {"text": text}
        role = {"role": "assistant"} if is_first else {}
        if self.streams:
            return {"delta": role | {"content": text}}
        return {"message": role | {"content": text, "refusal": None}}

    def logprobs(self, tokens: Tokens, offset: int) -> dict[str, Any]:
        """Returns the log-probabilities of tokens. offset: the length of earlier tokens' texts."""
        if self.url != CHAT:
            return of_completion(tokens, self.tokenizer, offset)
        entries = [of_chat(*each, self.tokenizer, self.params.logprobs) for each in tokens]
        return {"content": entries, "refusal": None}


# ------------------------------------------------------------------------------------ reading


def object_of(data: bytes) -> dict[str, Any]:
    """Returns the object that a JSON text describes. Raises ValueError if it is not one."""
    with naming("JSON"):
        row = json.loads(data, parse_float=finite, parse_constant=finite)
    if not isinstance(row, dict):
        raise ValueError("JSON must be an object")
    return row


def finite(text: str) -> float:
    """Returns the number in a text. Raises an error for one that JSON cannot represent: 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number, or is too large")
    return number


def with_text(prompt: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns a prompt as its text and its token ids."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt, verbose=False)}
    return {"prompt": tokenizer.decode(prompt), "prompt_token_ids": prompt}


def flag_of(body: dict[str, Any], name: str) -> bool:
    if (value := body.get(name, False)) not in (False, True):
        raise ValueError(f"{name} must be true or false")
    return value


def error_of(text: str, status: int, url: str) -> dict[str, Any]:
    """Returns OpenAI's error object. A message about bad input begins with the parameter."""
    # Starlette's message for an unknown URL
    text = f"{url} is not served: use {' or '.join(KNOWN)}" if text == "Not Found" else text
    found = re.match("[a-z_]+", text) if status == 400 else None
    name = found and found[0].replace("prompts", "messages" if url == CHAT else "prompt")
    return {"error": {
        "message": text, "type": "invalid_request_error" if status < 500 else "server_error",
        "param": name, "code": "invalid_api_key" if status == 401 else None}}
