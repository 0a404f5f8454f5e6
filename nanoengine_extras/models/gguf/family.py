"""`Family`: how a family of models differs from a Llama; and functions that several families
share."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """The differences from a Llama.

    kind, model_type: of the model, in transformers.
    names: the names of tensors, with or without an ending such as ".weight".
    reads: the entries of the file that are used, besides those of all models, each with its name in
        config.json; "": `own` reads it.
    own: turns a `Header` (quantized/gguf_header.py) into more entries of config.json.
    norms: the number that the converter adds to the weights of norms.
    is_permuted: whether the converter has reordered the rows of q and k, as for a Llama.
    bias: the entry of config.json that says whether q, k and v have biases.
    lists: the entries that can have a number for each layer; `own` reads all of the numbers.
    changes: returns entries for `Header.table`: numbers of the header that are tensors in
        transformers; None: tensors that are left out.
    """

    kind: str
    model_type: str
    names: dict[str, str] = {}
    reads: dict[str, str] = {}
    own: Callable[[Any], dict[str, Any]] = lambda header: {}
    norms: float = 0.0
    is_permuted: bool = False
    bias: str = "attention_bias"
    lists: tuple[str, ...] = ()
    changes: Callable[[Any], dict[str, list | None]] = lambda header: {}

    def config(self, header: Any) -> dict[str, Any]:
        """Returns the entries of config.json that a Llama does not have."""
        found = {"architectures": [f"{self.kind}ForCausalLM"], "model_type": self.model_type,
                 "pad_token_id": header.find("tokenizer.ggml.padding_token_id"),
                 self.bias: "blk.0.attn_q.bias" in header.tensors}
        found |= {given: header.of_model(name) for name, given in self.reads.items() if given}
        found |= self.own(header)
        return found if "rope_parameters" in found else found | {"rope_parameters": header.rope()}


def windows(header: Any, period: int) -> dict[str, Any]:
    """Returns which layers see all keys. If the file does not say it, these are the layers whose
    number, counted from 1, is a multiple of the period."""
    name = "attention.sliding_window_pattern"
    of_layers = header.find(f"{header.architecture}.{name}")
    if not isinstance(of_layers, list):
        period = header.of_model(name, period)
        of_layers = [(index + 1) % period != 0 for index in range(header.num_layers)]
    return {"sliding_window": header.of_model("attention.sliding_window"), "layer_types": [
        "sliding_attention" if is_local else "full_attention" for is_local in of_layers]}


def by_layer(header: Any, name: str) -> list[Any]:
    """Returns an entry's value for each layer."""
    found = header.find(f"{header.architecture}.{name}")
    if isinstance(found, list):
        return found
    return [header.of_model(name)] * header.of_model("block_count")


def rotated_in_part(header: Any) -> dict[str, Any]:
    """Only the first numbers of each head are rotated."""
    head_dim = header.head_dim()
    rotated = header.of_model("rope.dimension_count", head_dim)
    return {"rope_parameters": header.rope() | {"partial_rotary_factor": rotated / head_dim}}


# entries of the file that a family's own function reads
EPS = "attention.layer_norm_epsilon"
WINDOW = {"attention.sliding_window": ""}
CAP = {"final_logit_softcapping": ""}
EXPERTS = {"expert_count": ""}
PART = {"rope.dimension_count": ""}
# for images: a token of text has the same position in all sections
SECTIONS = {"rope.dimension_sections": ""}
# the norms after the attention and after the MLP
AFTER = {"post_attention_norm": "post_attention_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm"}
