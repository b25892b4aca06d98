"""The name of a rule: a placement, and the order in which requests wait where it sends them.

`PLACEMENT[@NUMBER[:NUMBER]][+ORDER[@KNOB[:SET_BACK]]]`, such as `sed`, `marginal_delay@5:3` or
`sed+sjf@60:2`. A champion or a policy file may stand in place of the placement: `champion+wspt`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_ORDER, _NUMBERS, _NUMBER = "+", "@", ":"


class Term(NamedTuple):
    """A placement or an order, with the numbers that its name gives it."""

    base: str
    numbers: str | None = None
    """As they are written, `5:3`; None: those that were tuned, or the defaults, apply."""

    @classmethod
    def parse(cls, text: str) -> Term:
        """Take `BASE@NUMBER:NUMBER` apart; nothing is checked."""
        base, separator, numbers = text.partition(_NUMBERS)
        return cls(base, numbers if separator else None)

    @classmethod
    def of(cls, base: str, *values: float) -> Term:
        """Name a placement or an order with these numbers."""
        # Without the sign of a positive exponent, which would begin an order.
        numbers = _NUMBER.join(f"{value:g}".replace("e+", "e") for value in values)
        return cls(base, numbers if values else None)

    def values(self) -> list[float]:
        """The numbers; none where the name gives none.

        Raises:
            ValueError: One of them is no number from 0 on.
        """
        return [] if self.numbers is None else list(map(self._value, self.numbers.split(_NUMBER)))

    def _value(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{str(self)!r}: {text!r} behind {_NUMBERS} is no number from 0 on")
        return value

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        return self.base if self.numbers is None else f"{self.base}{_NUMBERS}{self.numbers}"


class RuleName(NamedTuple):
    """A rule's name, taken apart."""

    placement: Term
    order: Term | None = None
    """None: first come, first served."""

    @classmethod
    def parse(cls, text: str) -> RuleName:
        """Take a name apart; nothing is checked."""
        placement, separator, order = text.rpartition(_ORDER)
        if not separator:
            return cls(Term.parse(text))
        return cls(Term.parse(placement), Term.parse(order))

    @property
    def base(self) -> str:
        """The placement without numbers."""
        return self.placement.base

    def ordered(self, order: Term | None) -> RuleName:
        """The same placement with another order."""
        return self._replace(order=order)

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        return (
            str(self.placement) if self.order is None else f"{self.placement}{_ORDER}{self.order}"
        )
