"""What several tests need: the bundled model, and tiny models with random weights on disk."""

from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def bundled() -> str:
    return str(ROOT / "models" / "tiny-qwen3")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Saves a small random model of an architecture; returns its folder and transformers' model."""

    def make(architecture: str = "Qwen3", seed: int = 0, **changes):
        options = dict(
            vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
            initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0) | changes
        if options["head_dim"] is None:
            del options["head_dim"]
        config = getattr(transformers, f"{architecture}Config")(**options)
        torch.manual_seed(seed)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # or they would be 0 and 1: no test of them
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder)
        return str(folder), model

    return make


@pytest.fixture(scope="session")
def tiny(make_model) -> str:
    """The folder of a tiny Qwen3 without a tokenizer."""
    return make_model()[0]


def greedy_reference(model, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates for a prompt alone, greedily."""
    output = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
                            max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    return output[0, len(prompt):].tolist()


def random_prompts(lengths, vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]
