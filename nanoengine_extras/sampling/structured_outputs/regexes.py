"""Translates Python's regexes into Rust's, for llguidance.

Patterns of JSON schemas are JavaScript's. A part that the three languages read in different ways is
translated into one that all of them accept, or refused. What is invalid in Rust, too, llguidance
refuses. Each step takes time in proportion to the length of a regex.
"""

import re

# in letters
LONGEST = 10_000
# for each escape, the letters that it means in all of Python, JavaScript and Rust: \w is ASCII in
# JavaScript …
LETTERS = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[\s--\x85]", "D": r"[^\p{N}\x00]",
           "W": r"[^\p{L}\p{M}\p{N}\p{Pc}\x00]", "S": r"[^\s\x00\x1c-\x1f\ufeff]"}
# … and all letters except those that it means in any of them
EXCLUDED = {name: f"[^{LETTERS[name.swapcase()]}]" for name in LETTERS}
# an escape, a class, or a brace that begins no repetition in Rust
SPECIAL = re.compile(r"(?s)\\.?|\[\^?\]?(?:\\.|[^\]\\])*(\]|\\?\Z)|\{,\d*\}|\{(?!\d+(?:,\d*)?\})")
# what only Rust permits: a repetition of a repetition, of ^ or of $, and some flags; and flags in
# the middle, which Python accepted before 3.11
REFUSED = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})(?:[*+]|\?[*+?]|\??\{\d)|[\^$](?:[*+?]|\{\d)"
                     r"|\(\?\w*[xUR]|\(\?\w*-\w*(?:u|\))|(?!^)\(\?\w+\)")


def common_regex(regex: str) -> str:
    r"""Returns a regex for llguidance (Rust) whose texts also match in Python and in JavaScript.

    Raises ValueError for other escapes, such as \b, for classes that only Rust reads as sets, such
    as [a-z&&[^b]], for possessive quantifiers, for (?x), and for more than LONGEST letters.
    """
    if len(regex) > LONGEST:
        raise ValueError(f"a regex cannot have {len(regex)} letters: at most {LONGEST}")
    letters = re.sub(r"(?s)\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|.)", as_letter, regex)
    if found := REFUSED.search(SPECIAL.sub(".", letters)):
        raise ValueError(f"{found[0]} is not supported in a regex")
    return SPECIAL.sub(for_rust, letters)


def as_letter(escape: re.Match) -> str:
    r"""Returns the letter of \x41, \u0041 or \<, and any other escape as it is."""
    code = escape[1] or escape[2]
    letter = chr(int(code, 16)) if code else escape[0].removeprefix("\\")
    if letter in "<>" or code and not re.match(r"[!-/:-@[-`{-~]", letter):
        return letter
    return "\\" + letter


def for_rust(special: re.Match) -> str:
    """Translates a part of a regex that Rust may read differently from Python."""
    part = special[0]
    if part == "{":
        return r"\{"
    plain = re.sub(r"\\[dwsDWSfnrt_\W]", "", part)
    if special[1] in ("", "\\") or re.search(r"\\|\[\[|&&|--|~~|^\{", plain):
        raise ValueError(f"{part:.100} is not supported in a regex")
    if part[0] == "\\":
        return LETTERS.get(part[1], part)
    begin, known = ("[^", EXCLUDED) if part[1] == "^" else ("[", LETTERS)
    for low, high in re.findall(r"(?s)(\\.|.)(?:-(\\.|.))?", part[len(begin):-1]):
        if high and {low[1:], high[1:]} & LETTERS.keys():
            raise ValueError(f"{low}-{high} is not supported in a regex")
    # Rust has [[:alpha:]], and reads []-a] differently
    body = re.sub(r"(?s)\\(.)|[]:[]", lambda each: known.get(each[1], "\\" + each[0][-1]),
                  part[len(begin):-1])
    # llguidance mistakes a class with all control characters for one with quotes and backslashes
    return rf"[{begin}{body}]&&[^\x00]]"
