"""How a chat template uses the messages: what it reads in its syntax tree.

Templates expect messages in different forms: contents as strings or as lists of parts, arguments of
tool calls as objects or as JSON strings. `uses` finds how a template uses a field.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template


def parse(template: str) -> nodes.Template:
    """Returns the syntax tree of a template."""
    return _compile_jinja_template(template).environment.parse(template)


@lru_cache
def knows(template: str, role: str) -> bool:
    """Returns whether a template names a role: `m.role == "developer"`."""
    return any(each.value == role for each in parse(template).find_all(nodes.Const))


def missing_content(template: str) -> dict[str, Any]:
    """Returns the content that a template expects in a message that has only tool calls.

    Some templates write a call only if the content is None, or is not defined; others would print
    "None". With `if message.content`, a template cannot tell None from an empty string.
    """
    # templates often test the first message, usually the system's, separately
    found = uses(template, "content", but_first=True)
    is_shown = {"for", "| tojson"} & found
    if "is none" in found or ("is string" in found and not is_shown):
        return {"content": None}
    return {} if "is defined" in found else {"content": ""}



def takes_parts(template: str) -> bool:
    """Returns whether a template loops over the parts of a message: `for part in m.content`.

    Like vLLM, it looks for such a loop in the template's syntax tree.
    """
    return "for" in uses(template, "content")


def form_of_arguments(template: str) -> str:
    """Returns the form of a tool call's arguments that a template expects.

    "object": most templates expect it; they write `arguments | tojson` or the whole call.
    "text": a JSON string, which they print or add to other strings.
    "given": either; the template looks at the type itself.
    """
    found = uses(template, "arguments")
    if {"is string", "is mapping"} & found:
        return "given"
    as_text = {"print", "| string", *(f".{name}" for name in dir(str))}
    as_object = {"for", "[]", "| tojson", "| items", "| dictsort"} | {
        use for use in found if use.startswith(".") and use not in as_text}
    return "text" if as_text & found and not as_object & found else "object"


# filters that change a value
CONVERTING = {"tojson", "string", "items", "dictsort", "length", "count"}


@lru_cache
def uses(template: str, field: str, but_first: bool = False) -> frozenset[str]:
    """Returns how a template uses a field of its messages or of their tool calls.

    "print": it is printed, or added to a string; "for": the template loops over it; "is string",
    "| tojson", ".items": this test, filter or method is applied to it; "[]": it is indexed.

    but_first: except for `messages[0]`
    """
    tree = parse(template)
    first = nodes.Getitem(nodes.Name("messages", "load"), nodes.Const(0), "load")
    # the names of the field, and of variables that it is assigned to
    names = {field}

    def is_field(node: Any) -> bool:
        match node:
            case nodes.Getattr(node=base) | nodes.Getitem(node=base) if but_first and base == first:
                return False
            case nodes.Getitem(node=base, arg=nodes.Slice()):
                return is_field(base)
            case nodes.Filter(node=base, name=name):
                return name not in CONVERTING and is_field(base)
            case nodes.Or() | nodes.And() | nodes.CondExpr():
                return any(map(is_field, node.iter_child_nodes(exclude=["test"])))
            case (nodes.Name(name=name) | nodes.Getattr(attr=name)
                  | nodes.Getitem(arg=nodes.Const(value=name))
                  | nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_])):
                return name in names
        return False

    while bound := assigned(tree, is_field) - names:
        names |= bound
    found = set()
    for node in tree.find_all(nodes.Node):
        match node:
            case nodes.Test(node=base, name=name) if is_field(base):
                found.add("is defined" if name == "undefined" else f"is {name}")
            case nodes.Filter(node=base, name=name) if is_field(base):
                found.add(f"| {name}")
            case nodes.For(iter=base) if is_field(base):
                found.add("for")
            case nodes.Getattr(node=base, attr=name) if is_field(base):
                found.add(f".{name}")
            case nodes.Getitem(node=base, arg=key) if is_field(base):
                found.add("print" if isinstance(key, nodes.Slice) else "[]")
            case nodes.Compare(expr=nodes.Const(value=name)) if name in names:
                # 'content' in message
                found.add("is defined")
            case nodes.Compare(expr=base, ops=[nodes.Operand(expr=nodes.Const(value=None))]):
                found |= {"is none"} if is_field(base) else set()
            case nodes.Output() | nodes.Add() | nodes.Concat() | nodes.Mod():
                found |= {"print"} if any(map(is_field, node.iter_child_nodes())) else set()
    return frozenset(found)


def assigned(tree: nodes.Template, is_field: Callable[[Any], bool]) -> set[str]:
    """Returns the variables to which a template assigns a field, and parameters of its macros."""
    found = {each.target.name for each in tree.find_all(nodes.Assign)
             if isinstance(each.target, nodes.Name) and is_field(each.node)}
    macros = {each.name: each.args for each in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            arguments = zip(macros.get(call.node.name, ()), call.args)
            found |= {name.name for name, value in arguments if is_field(value)}
            found |= {each.key for each in call.kwargs if is_field(each.value)}
    return found
