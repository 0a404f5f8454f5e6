"""A checkpoint that writes what its prompt says: real texts at the cost of a real model.

    python tests/prompter/checkpoint.py FOLDER [--config qwen3-0.6b] [--distance 1024]

What a model writes decides how often a guesser is right, and random weights write nothing that
resembles a text. This model has the shape of its config, and computes all of it, but what it writes
is given: after each token it writes the one that stands `distance - 1` tokens before. So a prompt of
`distance` tokens begins with the text to write:

    prompt   the text, enciphered | the visible part: a task, a document …
    output   the text

The enciphered tokens have ids of their own (`Cipher`), which only the model understands. So neither
a lookup in the prompt nor the visible part knows the text, as with a model that makes it up.

How: the first attention head sees one token, `distance - 1` before its own. Its scores depend on
the distance alone, since a query and a key are constants, which the rotation turns (RoPE). Its value
is the code of that token, which the output matrix compares with the codes of all tokens. All other
output projections are 0, so that nothing else reaches the residual stream.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

# the first enciphered id, above those of the tokenizer
FIRST = 130_000
# numbers of a code, and pairs of a head that the rotation turns fast
CODE, FAST = 128, 16


class Cipher(dict[int, int]):
    """From the tokens of some texts to ids of their own, and the tokens of these ids."""

    def __init__(self, texts: Iterable[list[int]]) -> None:
        tokens = sorted({token for text in texts for token in text})
        super().__init__((token, FIRST + i) for i, token in enumerate(tokens))


def weights(config: dict, distance: int, cipher: Cipher) -> dict[str, Tensor]:
    """Returns the weights of a Qwen3 checkpoint, in bfloat16."""
    size, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    inner, vocabulary = config["intermediate_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    tensors = {"model.norm.weight": torch.ones(size)}
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in {
            "input_layernorm": torch.ones(size), "post_attention_layernorm": torch.ones(size),
            "self_attn.q_norm": torch.ones(head_dim), "self_attn.k_norm": torch.ones(head_dim),
            "self_attn.q_proj": noise(queries, size), "self_attn.k_proj": noise(keys, size),
            "self_attn.v_proj": noise(keys, size), "self_attn.o_proj": torch.zeros(size, queries),
            "mlp.gate_proj": noise(inner, size), "mlp.up_proj": noise(inner, size),
            "mlp.down_proj": torch.zeros(size, inner)}.items()}

    # a code of length 1 for each token, and a constant: the mean of all squares is 1
    codes = torch.zeros(vocabulary, CODE)
    plain = torch.tensor([*cipher])
    codes[plain] = torch.nn.functional.normalize(noise(len(plain), CODE))
    codes[torch.tensor([*cipher.values()])] = codes[plain]
    embedding = torch.zeros(vocabulary, size)
    embedding[:, :CODE] = codes * (size / 2) ** 0.5
    embedding[:, -1] = (size / 2) ** 0.5
    # the output matrix reads what the head has written, behind the codes
    head = torch.zeros(vocabulary, size)
    head[plain, CODE:2 * CODE] = codes[plain]
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}

    first = {name: tensors[f"model.layers.0.self_attn.{name}.weight"]
             for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    turns = (distance - 1) * config["rope_theta"] ** (-torch.arange(FAST) * 2.0 / head_dim)
    for name in ("q_proj", "k_proj", "v_proj"):
        first[name][:head_dim] = 0
    first["q_proj"][:FAST, -1] = torch.cos(turns)
    first["q_proj"][head_dim // 2:head_dim // 2 + FAST, -1] = -torch.sin(turns)
    first["k_proj"][:FAST, -1] = 1
    first["v_proj"][:CODE, :CODE] = torch.eye(CODE)
    first["o_proj"][CODE:2 * CODE, :CODE] = torch.eye(CODE)
    for name in ("q_norm", "k_norm"):
        # a sharp softmax: the next best distance is some 40 below the best
        first[name].fill_(6.5)
    return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}


def save(folder: Path, config: dict, distance: int, cipher: Cipher) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(config, distance, cipher), folder / "model.safetensors")
