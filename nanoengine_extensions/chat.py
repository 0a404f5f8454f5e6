"""Turns conversations into prompts, by the tokenizer's chat template, for `LLM.chat`."""

from typing import Any

from nanoengine.sampling_params import naming, rejected


def render(tokenizer: Any, messages: Any, *, chat_template: str | None = None,
           add_generation_prompt: bool = True, continue_final_message: bool = False,
           tools: Any = None, chat_template_kwargs: Any = None) -> list[dict[str, Any]]:
    """Returns a prompt for each conversation.

    The options are those of `LLM.chat`.
    """
    chats = [messages] if is_chat(messages) else messages
    if not isinstance(chats, list) or not chats or not all(map(is_chat, chats)):
        raise rejected("messages", messages, "a list of {'role', 'content'}, or of such lists")
    options = dict(chat_template_kwargs or {}, chat_template=chat_template, tools=tools,
                   add_generation_prompt=add_generation_prompt,
                   continue_final_message=continue_final_message, tokenize=False)
    with naming("messages"):
        chats = [[message | {"content": text_of(message.get("content"))} for message in chat]
                 for chat in chats]
        texts = tokenizer.apply_chat_template(chats, **options)
        # The template has written the special tokens.
        ids = tokenizer(texts, add_special_tokens=False).input_ids
    return [{"prompt": text, "prompt_token_ids": token_ids} for text, token_ids in zip(texts, ids)]


def is_chat(messages: Any) -> bool:
    """Returns whether this is one conversation."""
    return isinstance(messages, list) and len(messages) > 0 and all(
        isinstance(message, dict) and "role" in message for message in messages)


def text_of(content: Any) -> str:
    """Returns the content of a message as one text, text parts joined by newlines, as in vLLM."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    with naming(rejected("content", content, 'a text, or parts {"type": "text", "text": …}')):
        return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)
