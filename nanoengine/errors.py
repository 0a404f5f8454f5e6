"""How the error for bad input reads. What is refused, checks.py says; its extension strict.py has
the same words."""


def rejected(name: str, value: object, accepted: str) -> ValueError:
    """Returns the error for bad input: the argument, its value and what is accepted."""
    return ValueError(f"{name}={value!r:.1000} is not accepted: it must be {accepted}")
