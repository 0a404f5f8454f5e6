"""`quantization_config` of config.json: which of its entries can be computed exactly."""

import re
from collections.abc import Iterator
from typing import Any

from nanoengine.errors import naming, rejected

# an entry, its value, and what is accepted
Row = tuple[str, Any, list]

# the advice for formats that are not read
ROUNDED = "which quantization='int8' or 'int4' rounds when it is loaded"
INSTEAD = f"it must be the model that was quantized, {ROUNDED}, or its version in GGUF, AWQ or GPTQ"
# entries that ask for rounded activations, or a rounded KV cache
ACTIVATIONS = ("input_activations", "output_activations", "kv_cache_scheme", "activation_scheme",
               "activation", "load_in_8bit")
# entries of GPTQModel and AutoRound: weights are rotated, so some products need rotated inputs
ROTATIONS = "rotation", "rotation_config", "spinquant_config"
# compressed-tensors: how weights are stored, and their types and bits
STORED = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
          "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"]
TYPES = ["int 4", "int 8", "float 4", "float 8"]
# how many outputs and inputs have one scale, 0 for all: by compressed-tensors' strategy, and by
# ModelOpt's algorithm
STRATEGIES = {"tensor": (0, 0), "channel": (1, 0)}
BLOCKS = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128),
          "NVFP4": (1, 16), "W4A16_NVFP4": (1, 16), "MXFP8": (1, 32)}
ALGORITHMS = ["", *BLOCKS, "MIXED_PRECISION"]
# GPTQ's bits
BITS = [2, 3, 4, 8]
# the format of AutoRound's files
PACKING = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto": "gptq",
           "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
           "auto_round:auto_awq": "awq", "auto_round:awq": "awq"}


def gptq_format(c: dict[str, Any]) -> str:
    given = "awq" if c.get("quant_method") == "awq" else PACKING.get(c.get("packing_format", ""))
    return given or c.get("checkpoint_format") or c.get("format") or "gptq"


def awq_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "bits", c.get("bits", c.get("w_bit", 4)), [4]
    yield "version", str(c.get("version") or c.get("format") or "gemm").lower(), ["gemm"]
    yield "backend", c.get("backend") if c.get("backend") == "llm-awq" else None, [None]


def gptq_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "bits", c.get("bits"), BITS
    yield "checkpoint_format", gptq_format(c), ["gptq", "gptq_v2"]
    yield "is_marlin_format", c.get("is_marlin_format", False), [False]
    yield "pack_dtype", c.get("pack_dtype", "int32"), ["int32"]
    # modules that are left out ("-:…"), or have other bits or groups, show in the files
    for pattern, changes in (c.get("dynamic") or {}).items():
        yield f"dynamic[{pattern!r}].bits", (changes or {}).get("bits", c.get("bits")), BITS


def bits_of(c: dict[str, Any]) -> set[int]:
    """Returns how many bits a number of GPTQ has; modules can differ."""
    rows = ROWS[c["quant_method"]](c)
    return {value for name, value, _ in rows if name.endswith("bits") and value in BITS}


def compressed_rows(c: dict[str, Any]) -> Iterator[Row]:
    for number, group in (c.get("config_groups") or {}).items():
        # such as one that rounds only what attention gets
        if not (weights := group.get("weights")):
            continue
        name = f"config_groups.{number}"
        yield f"{name}.format", group.get("format") or c.get("format"), STORED
        kind = f"{weights.get('type', 'int')} {weights.get('num_bits')}"
        yield f"{name}.weights.type and num_bits", kind, TYPES
    # they change other weights, or what is computed with them
    yield "sparsity_config", (c.get("sparsity_config") or {}).get("format", "dense"), ["dense"]
    yield "transform_config", (c.get("transform_config") or {}).get("config_groups") or None, [None]


def algorithm_of(c: dict[str, Any]) -> str:
    return str(c.get("quant_algo") or "").upper()


def blocks_in(c: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns how many outputs and inputs have one scale, 0 for all, as the entries say it, also
    those within others: modules can differ."""
    # such as [128, 128], "128x128" and 128; a size of -1 is a whole row, and AutoRound's group_size
    # can be a block
    names = ("weight_block_size", "block_structure", "group_size", "q_group_size")
    text = str(next(filter(None, map(c.get, names)), None))
    sizes = [max(0, int(size)) for size in re.findall(r"-?\d+", text)]
    given: list[Any] = [STRATEGIES.get(c.get("strategy", "")), BLOCKS.get(algorithm_of(c)),
                        sizes and (1, *sizes)[-2:]]
    others = (each for name, each in c.items() if name not in ACTIVATIONS)
    inner = [blocks_in(each) for each in others if isinstance(each, dict)]
    return [*dict.fromkeys(sum(inner, [*filter(None, given)][:1]))]


def modelopt_rows(c: dict[str, Any]) -> Iterator[Row]:
    # of 2024
    yield "quantization", c.get("quantization"), [None]
    yield "quant_algo", algorithm_of(c), ALGORITHMS
    for name, layer in (c.get("quantized_layers") or {}).items():
        yield f"quantized_layers[{name!r}].quant_algo", algorithm_of(layer), ALGORITHMS


def auto_round_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "packing_format", c.get("packing_format") or "auto", [*PACKING]
    yield "data_type", str(c.get("data_type") or "int")[:3], ["int"]
    yield "act_bits", c.get("act_bits") or 16, [16, 32]
    kind, bits = ("awq", [4]) if gptq_format(c) == "awq" else ("gptq", BITS)
    yield from ROWS[kind](c)
    # 16 and 32 bits: modules that are left out
    for name, changes in (c.get("extra_config") or {}).items():
        yield f"extra_config[{name!r}].bits", changes.get("bits", c.get("bits", 4)), [*bits, 16, 32]
        yield f"extra_config[{name!r}].act_bits", changes.get("act_bits") or 16, [16, 32]


def fp8_rows(c: dict[str, Any]) -> Iterator[Row]:
    # the second one in MiniMax M2
    yield "fmt", c.get("fmt") or "e4m3", ["e4m3", "float8_e4m3fn"]
    # GPTQModel divides by weight_scale_inv, and DeepSeek multiplies by it
    yield "weight_scale_semantics", c.get("weight_scale_semantics"), [None]


def mlx_rows(c: dict[str, Any]) -> Iterator[Row]:
    # modules that differ; False: one that is not quantized
    others = {f"{name}.": each for name, each in c.items() if isinstance(each, dict)}
    for name, each in ({"": c} | others).items():
        yield f"{name}mode", each.get("mode", "affine"), ["affine"]
        yield f"{name}bits", each.get("bits"), [2, 3, 4, 5, 6, 8]
        yield f"{name}group_size", each.get("group_size"), [32, 64, 128]


def with_method(entries: dict[str, Any]) -> dict[str, Any]:
    """Names the method of MLX, whose config does not."""
    # the others are GPTQ's and AWQ's
    known = entries.keys() & {"bits", "sym", "desc_act", "zero_point"}
    is_mlx = entries.get("quant_method", "mlx") == "mlx" and known == {"bits"}
    return entries | {"quant_method": "mlx"} if is_mlx else entries


ROWS = {"awq": awq_rows, "gptq": gptq_rows, "compressed-tensors": compressed_rows,
        "fp8": fp8_rows, "modelopt": modelopt_rows, "auto-round": auto_round_rows,
        "mlx": mlx_rows,
        **dict.fromkeys(("bitsandbytes", "mxfp4", "gguf"), lambda entries: iter(()))}


def check(entries: dict[str, Any]) -> None:
    """Raises ValueError for weights that are not numbers of 2, 3, 4 or 8 bits times scales."""
    method = entries.get("quant_method")
    if method not in ROWS:
        raise rejected("the model's quant_method", method, f"one of {[*ROWS]}; otherwise {INSTEAD}")
    rotations = ((name, entries.get(name) or None, [None]) for name in ROTATIONS)
    with naming(f"the model's quantization_config={entries}"):
        rows = [*ROWS[method](entries), *rotations]
    for name, value, accepted in rows:
        if value not in accepted:
            raise rejected(f"the model's quantization_config.{name}", value,
                           f"one of {accepted}; otherwise {INSTEAD}")


def left_out(entries: dict[str, Any]) -> set[str]:
    """Returns the names of entries, also within others, that ask for rounded activations."""
    found = {name for name in ACTIVATIONS if entries.get(name)}
    # all but these round activations
    if algorithm_of(entries) not in ("", "W4A16_NVFP4", "FP8_PB_WO", "MIXED_PRECISION"):
        found.add("quant_algo")
    return found.union(*(left_out(each) for each in entries.values() if isinstance(each, dict)))
