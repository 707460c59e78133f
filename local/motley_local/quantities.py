"""Kubernetes quantities: ``500m``, ``2Gi``, ``1e3``."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_SUFFIXES: dict[str, Decimal] = {
    "": Decimal(1),
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
}
_QUANTITY = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTP]|[KMGTP]i)?$")


def parse_quantity(text: str) -> Decimal:
    """Value in base units: ``parse_quantity("2Gi") == 2147483648``.

    Raises:
        ValueError: the text is not a quantity.
    """
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"quantity must look like 500m or 2Gi, got {text!r}")
    return Decimal(match.group(1)) * _SUFFIXES[match.group(2) or ""]


def divided(text: str, divisor: str) -> str:
    """What a ``resourceFieldRef`` shows: the quantity in units of the divisor, rounded up."""
    by = parse_quantity(divisor) or Decimal(1)
    return str(math.ceil(parse_quantity(text) / by))
