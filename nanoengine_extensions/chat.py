"""Conversations as prompts, by the tokenizer's chat template. `LLM.chat` is its seam."""

from typing import Any

from nanoengine.sampling_params import naming, rejected


def render(tokenizer: Any, messages: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One conversation or a list of them, as prompts.

    options: of transformers' `apply_chat_template`, and what the template itself asks for.
    """
    if not isinstance(messages, list) or not messages:
        raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
    chats = messages if isinstance(messages[0], list) else [messages]
    more = options.pop("chat_template_kwargs", None) or {}
    options = {"add_generation_prompt": True} | more | options | {"tokenize": False}
    with naming("messages"):
        texts = tokenizer.apply_chat_template(chats, **options)
        # The template has written the special tokens.
        ids = tokenizer(texts, add_special_tokens=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids}
            for text, token_ids in zip(texts, ids)]
