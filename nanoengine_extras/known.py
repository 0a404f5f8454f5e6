"""Finds the modules that `optimize` of a library of kernels, cpu/ or gpu/, can replace: their
forward has the code that a docstring shows.

    class Fast(nn.Module):
        \"""A fast MLP. In place of:

            def forward(self, x):
                return self.down_proj(swiglu(self.gate_up_proj(x)))

            def swiglu(gate_up):
                gate, up = gate_up.chunk(2, dim=-1)
                return F.silu(gate) * up
        \"""

Functions that the forward calls by name follow it. Comments, docstrings, types and layout do not
count; everything else does. So `optimize` does not replace a forward that was changed, overridden
in a subclass or set on a module.
"""

import ast
import functools
import textwrap
from collections.abc import Callable
from inspect import getsource, isfunction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# a model has many modules of the same class
source_of = functools.cache(getsource)


def has_code_of(fast: Any, module: nn.Module) -> bool:
    """Whether the forward of a module has the code that the docstring of `fast` shows."""
    try:
        # with -OO, only the source still has the docstring
        docstring = source_of(fast).split('"""')[1]
        shown = bare(docstring.partition("In place of:\n")[2])
        return "forward" not in vars(module) and code_of(type(module).forward) == shown
    # no source, or none that can be compared
    except (OSError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError):
        return False


def code_of(function: Callable) -> tuple[str, ...]:
    """The code of a function, and then of those that it calls by name. Raises ValueError for one
    that uses globals other than functions and PyTorch."""
    code = bare(source_of(function.__code__))
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isfunction(value):
            code += code_of(value)
        elif not any(value is each for each in (None, torch, F)):
            raise ValueError(name)
    return code


@functools.cache
def bare(source: str) -> tuple[str, ...]:
    """Each function in the source, without comments, docstrings and types."""
    functions: Any = ast.parse(textwrap.dedent(source))
    for node in ast.walk(functions):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            node.body = node.body[ast.get_docstring(node) is not None:]
    return tuple(map(ast.unparse, functions.body))
