"""What a person has to know where a file could not be written. Runs in every process that writes."""

from __future__ import annotations

# The system's words in exceptions of safetensors and tokenizers, and torch's own, which leaves them out.
SIGNS = ("os error", "PytorchStreamWriter", "inline_container")


def failed(error: BaseException) -> bool:
    """Whether an exception says that a write failed: each library that writes for us has a kind of its own."""
    return isinstance(error, OSError) or any(sign in str(error) for sign in SIGNS)


def cause(error: BaseException) -> str:
    """The first line of what it says. torch's own words of a write that stopped half-way are about itself."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return "the write stopped half-way" if any(sign in text for sign in SIGNS[1:]) else text
