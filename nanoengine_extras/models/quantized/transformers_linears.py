"""Quantized weights of models that transformers computes (transformers_models), packed for a CPU.

transformers fills a model by its own rules: it renames tensors, ties them, and merges those of
experts. So it first gets an `Origin` for each matrix, which takes no memory and shows where in the
model the matrix belongs. Then the matrices are read and packed one by one.

    linears, embeddings       their numbers stay packed
    experts                   they become linears: see the extension experts.py
    others                    dequantized: such as GPT-2's Conv1D, and linears whose weight the
                              model reads directly
    no origin is left         transformers has merged or cast such matrices in another way:
                              the model is loaded again, with their dequantized numbers
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nanoengine.errors import logger
from nanoengine.features import extension, is_installed
from nanoengine_extras.cpu.memory import SharedPages, release_memory
from nanoengine_extras.cpu.modules import PackedLinear, kind_of
from nanoengine_extras.cpu.packed import QuantizedLinear
from nanoengine_extras.models.quantized.loading import read_part, with_rows
from nanoengine_extras.models.quantized.origins import Origin
from nanoengine_extras.models.quantized.stored import Opened, Stored
from nanoengine_extras.models.quantized.transformers_files import (
    check_parts, from_tensors, in_order)
from nanoengine_extras.models.transformers_models.modules import GatedMLP, Others, exchange

# parameters: a module, and a name in it
Places = list[tuple[Any, str]]


def load_packed(tensors: Opened, kind: Any, folder: object, config: Any, dtype: torch.dtype,
                **options: Any) -> tuple[Any, dict[str, Any]]:
    """Like `transformers_files.load`. dtype: the model's dtype"""
    of_files, tensors = tensors, in_order(tensors, kind, config)
    # origins cannot be made in this mode
    with torch.inference_mode(False):
        given = {name: origin_of(each, dtype) for name, each in tensors.items()}
    while True:
        with torch.inference_mode(False):
            causal, found = from_tensors(given, kind, config, dtype=dtype, **options)
        experts = experts_of(causal)
        places = places_of(causal)
        kept = {*places, *(each for module in experts for parts in parts_of(module)
                           for each in parts)}
        gone = [name for name, each in given.items()
                if isinstance(each, Origin) and not kept.intersection(tensors[name].matrices)]
        if not gone:
            break
        # its memory
        del causal, experts
        given |= {name: tensors[name] for name in gone}
    check_parts(of_files, found)
    with torch.device("cpu"):
        others: Others = {}
        known = {tensor for tensor, own in places.items() if fill(own, tensor, dtype, others)}
        for module in experts:
            jobs = parts_of(module)
            are_gated = extension("models.experts").kind_of(module) is GatedMLP
            linears = in_threads(partial(linear_of, SharedPages(), dtype, are_gated), jobs)
            known.update(each for parts, made in zip(jobs, linears)
                         if isinstance(made, QuantizedLinear)
                         for each in parts)
            others[module] = extension("models.experts").build(module, linears)
            release_memory()
        exchange(causal, others)
        causal(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
        plain: Others = {}
        for tensor, own in places.items():
            made = {others[module]: module for module, _ in own if module in others}
            if any(getattr(each, "was_read", False) for each in made):
                put(own, tensor.read().to(dtype))
                plain |= made
                known.remove(tensor)
        exchange(causal, plain)
    left = [name for name, each in tensors.items()
            if each.is_quantized and not known.issuperset(each.matrices)]
    if left:
        logger.warning(
            f"quantized weights of {len(left)} matrices are dequantized when they are loaded, "
            f"since no linear and no embedding has them as they are stored: {left[:3]}")
    return causal, found


def origin_of(tensor: Stored, dtype: torch.dtype) -> Any:
    """Returns the substitute that transformers gets for a tensor: the tensor itself if it is a
    vector."""
    if tensor.parts or len(tensor.shape) == 2:
        return Origin(tensor.shape, dtype, tensor.parts or [tensor])
    return tensor


def parts_of(experts: Any) -> list[list[Stored]]:
    """Returns the matrices of files of which each linear of some experts consists."""
    return [*experts.gate_up_proj.parts, *experts.down_proj.parts]


def places_of(model: nn.Module) -> dict[Stored, Places]:
    """Returns where in the model each matrix of the files is; a tied one is in several places."""
    found: dict[Stored, Places] = defaultdict(list)
    for module in model.modules():
        for name, each in module._parameters.items():
            if isinstance(each, Origin) and each.ndim == 2 and len(each.parts or ()) == 1:
                found[each.parts[0]].append((module, name))
    return found


def experts_of(model: nn.Module) -> list[Any]:
    """Returns the modules whose experts consist of matrices of the files."""
    if not is_installed("models.experts"):
        return []
    return [module for module in model.modules() if extension("models.experts").kind_of(module)
            and all(isinstance(each, Origin) and each.parts for each in module.parameters())]


def in_threads(function: Callable, jobs: list) -> list:
    """Calls a function for each job. One matrix of an expert is too small for several threads."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return [*pool.map(function, jobs)]
    finally:
        # threads that begin later use the last number that any thread has set
        torch.set_num_threads(count)


def linear_of(space: Callable, dtype: torch.dtype, is_gated: bool,
              tensors: list[Stored]) -> nn.Linear:
    """Returns a linear of an expert, with the rows of one matrix or of two. They are packed if one
    product can compute them all. is_gated: whether the product of gates and ups becomes SwiGLU"""
    parts = [read_part(each, dtype, space) for each in tensors]
    outputs = sum(each.shape[0] for each in tensors)
    linear = nn.Linear(tensors[0].shape[1], outputs, bias=False, device="meta")
    return with_rows(linear, parts, len(parts) if is_gated else 1)


def fill(places: Places, tensor: Stored, dtype: torch.dtype, others: Others) -> bool:
    """Adds modules with a packed weight to `others`, or gives the modules their weight. Returns
    whether all of them can use packed weights. If this weight has no packed form, a line in the log
    says so."""
    # in place of their origin: an ordinary linear has no such parameter
    put(places, torch.empty(tensor.shape, dtype=dtype, device="meta"))
    if not all(can_be_packed(module, name) for module, name in places):
        put(places, tensor.read().to(dtype))
        return False
    weight = read_part(tensor, dtype)
    if isinstance(weight, Tensor):
        put(places, weight)
        return True
    others.update((module, with_rows(module, [weight])) for module, _ in places)
    return True


def put(places: Places, weight: Tensor) -> None:
    """Gives modules a weight that is not packed."""
    parameter = nn.Parameter(weight, requires_grad=False)
    for module, name in places:
        module._parameters[name] = parameter


def can_be_packed(module: Any, name: str) -> bool:
    if isinstance(module, nn.Linear):
        return kind_of(module) is PackedLinear
    is_embedding = isinstance(module, nn.Embedding) and name == "weight"
    return is_embedding and module.max_norm is None and looks_up(module)


def looks_up(embedding: nn.Embedding) -> bool:
    """Tests whether each result depends only on its row of the weight."""
    trial = copy.copy(embedding)
    trial.padding_idx = None
    weight = torch.randn(5, embedding.embedding_dim, dtype=torch.float32)
    ids = torch.tensor([[3, 0, 3, 2]])
    try:
        whole = functional_call(trial, {"weight": weight}, (ids,))
        part = functional_call(trial, {"weight": weight[ids[0]]}, (torch.arange(4)[None],))
    except Exception:
        # it takes other arguments, or ids that this weight does not have
        return False
    return torch.equal(whole, part)
