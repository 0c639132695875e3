"""The package `tokenizers`, which a broken environment may lack."""

from __future__ import annotations

from megatron.errors import ConfigError


def require_tokenizers() -> None:
    """Checks that the package is there, before something is imported from it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as failure:
        raise ConfigError(
            "this vocabulary or tokenizer needs the tokenizers package: pip install tokenizers."
        ) from failure
