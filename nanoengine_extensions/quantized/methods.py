"""`quantization_config` of config.json: which of its entries can be computed exactly."""

from collections.abc import Iterator
from typing import Any

from nanoengine.features import rejected

# an entry, its value, and what is accepted
Row = tuple[str, Any, list]

# of formats that are not read, or that round activations, too
ROUNDED = "which quantization='int8' or 'int4' rounds when it is loaded"
INSTEAD = f"it must be the model that was quantized, {ROUNDED}, or its version in GGUF, AWQ or GPTQ"
NAMES = {"fbgemm_fp8": "FP8 of FBGEMM"}


def gptq_format(c: dict[str, Any]) -> str:
    return c.get("checkpoint_format") or c.get("format") or "gptq"


def awq_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "bits", c.get("bits", c.get("w_bit", 4)), [4]
    yield "version", str(c.get("version") or c.get("format") or "gemm").lower(), ["gemm"]
    yield "backend", c.get("backend") if c.get("backend") == "llm-awq" else None, [None]
    yield "zero_point", c.get("zero_point", True), [True]


def gptq_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "bits", c.get("bits"), [4, 8]
    yield "checkpoint_format", gptq_format(c), ["gptq", "gptq_v2"]
    yield "is_marlin_format", c.get("is_marlin_format", False), [False]
    yield "pack_dtype", c.get("pack_dtype", "int32"), ["int32"]
    # modules that are left out ("-:…"), or have other bits or groups, show in the files
    for pattern, changes in (c.get("dynamic") or {}).items():
        yield f"dynamic[{pattern!r}].bits", (changes or {}).get("bits", 4), [4, 8]


def compressed_rows(c: dict[str, Any]) -> Iterator[Row]:
    for number, group in (c.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        name = f"config_groups.{number}"
        yield f"{name}.format", group.get("format") or c.get("format"), ["pack-quantized"]
        yield f"{name}.weights.type", weights.get("type", "int"), ["int"]
        yield f"{name}.weights.num_bits", weights.get("num_bits"), [4, 8]
        yield f"{name}.weights.strategy", weights.get("strategy"), ["group", "channel", "tensor"]
        for part in ("input_activations", "output_activations"):
            yield f"{name}.{part}", group.get(part), [None]
    yield "kv_cache_scheme", c.get("kv_cache_scheme"), [None]
    # they change other weights, or what is computed with them
    yield "sparsity_config", (c.get("sparsity_config") or {}).get("format", "dense"), ["dense"]
    yield "transform_config", (c.get("transform_config") or {}).get("config_groups") or None, [None]


def bitsandbytes_rows(c: dict[str, Any]) -> Iterator[Row]:
    # INT8 rounds activations, too
    yield "load_in_4bit", c.get("load_in_4bit", c.get("_load_in_4bit", False)), [True]


def fp8_rows(c: dict[str, Any]) -> Iterator[Row]:
    yield "fmt", c.get("fmt") or "e4m3", ["e4m3"]


ROWS = {"awq": awq_rows, "gptq": gptq_rows, "compressed-tensors": compressed_rows,
        "bitsandbytes": bitsandbytes_rows, "fp8": fp8_rows, "mxfp4": lambda entries: iter(()),
        "gguf": lambda entries: iter(())}


def check(entries: dict[str, Any]) -> None:
    """Raises ValueError for weights that are not numbers of 4 or 8 bits times scales."""
    method = entries.get("quant_method")
    if method in NAMES:
        raise ValueError(f"the model is quantized as {NAMES[method]} (quant_method={method!r}), "
                         f"which is not read: {INSTEAD}")
    if method not in ROWS:
        raise rejected("the model's quant_method", method, f"one of {[*ROWS]}; otherwise {INSTEAD}")
    for name, value, accepted in ROWS[method](entries):
        if value not in accepted:
            raise rejected(f"the model's quantization_config.{name}", value,
                           f"one of {accepted}; otherwise {INSTEAD}")
