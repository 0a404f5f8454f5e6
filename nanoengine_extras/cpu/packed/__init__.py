"""Products with weights whose numbers stay packed: of 4, 5, 6 or 8 bits, or FP8, in groups of
inputs that share a scale. It knows no file format and no engine.

    modules.py      `PackedWeight`: packs a weight, looks up its rows, makes a linear of it
    fitting.py      which weights can be packed
    layout.py       numbers and scales as bytes, in the order in which kernels read them
    order.py        the order of the numbers in it
    kernel.py       the product, fused with the operations around it
    weights.py      blocks of a weight are expanded and multiplied
    expanding.py    numbers become weights, in LLVM IR
    numbers.py      packed words become numbers, in LLVM IR
    assembly.py     a few rows times numbers of 4 bits, for AVX2
"""

from nanoengine_extras.cpu.packed.modules import PackedWeight, QuantizedEmbedding, QuantizedLinear

__all__ = ["PackedWeight", "QuantizedEmbedding", "QuantizedLinear"]
