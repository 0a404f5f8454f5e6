"""Features without an engine, for tests of what they do to a sequence or a matrix."""

from types import SimpleNamespace

from nanoengine.features import asked_by
from nanoengine.observers import Features
from nanoengine_extras import OBSERVERS

EDITORS = ("sampling.constraints", "sampling.structured_outputs", "sampling.logits_processors")
# those of them that are not deleted
FEATURES = Features(EDITORS)


def constrain(seq, end_tokens, tokenizer, vocab_size) -> None:
    inputs = SimpleNamespace(
        vocab_size=vocab_size, tokenizer=tokenizer, eos_tokens=dict.fromkeys(end_tokens),
        get_tokenizer=lambda: tokenizer, check_vocabulary=lambda *_: None)
    for feature in FEATURES.values():
        feature.enter([seq], inputs)


def forbidden(seq):
    found = seq.kept.get("constraints")
    return found.next_to(seq) if found else iter(())


def apply(scores, seqs, last_sampled) -> None:
    """What the parameters ask for edits the rows, also if `enter` was not called."""
    asked = {name for seq in seqs for name in seq.edits} or {
        OBSERVERS.get(file) for seq in seqs for file in asked_by(seq.params)}
    for name, feature in FEATURES.items():
        if name in asked:
            feature.edit(scores, seqs, last_sampled)
