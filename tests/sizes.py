"""How large a test runs: at full size in `make test-all`, smaller at every change."""

from __future__ import annotations

from hypothesis import settings

SMALL_SHARE = 0.2
LEAST_EXAMPLES = 5


def register_profiles() -> None:
    """`fast` repeats the same few examples; `thorough` draws as many new ones as a test names."""
    # The first call of a compiled function loads it, and machines that run tests are shared: how
    # long one example takes says nothing.
    settings.register_profile("fast", deadline=None, derandomize=True, max_examples=scaled(100))
    settings.register_profile("thorough", deadline=None)


def is_thorough() -> bool:
    """Whether `--hypothesis-profile=thorough` was asked for."""
    return settings.get_current_profile_name() == "thorough"


def scaled(max_examples: int) -> int:
    """Return how many of so many examples are tried: all, or a fifth of them."""
    if is_thorough():
        return max_examples
    return max(round(max_examples * SMALL_SHARE), LEAST_EXAMPLES)
