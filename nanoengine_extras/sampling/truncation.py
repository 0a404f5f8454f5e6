"""`SamplingParams.truncate_prompt_tokens`: the end of a prompt that is too long."""

from nanoengine.errors import rejected
from nanoengine.sampling_params import SamplingParams


def truncated(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Returns the last tokens of a prompt: as many as are asked for; for -1, as many as leave room
    for `max_tokens`. Raises ValueError if there is no such room."""
    kept = params.truncate_prompt_tokens
    assert kept is not None
    if kept < 0:
        kept = max_model_len - (params.max_tokens or 1)
    if kept < 1:
        raise rejected("truncate_prompt_tokens", params.truncate_prompt_tokens, "at least 1, or -1 "
                       f"with max_tokens below max_model_len={max_model_len}")
    return token_ids[-kept:]


PARTS = {"truncate": truncated}
