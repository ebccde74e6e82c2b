"""Words and numbers that several reports print."""

import numpy as np


def counted(number: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def plus_minus(value: float, error: float) -> str:
    """`1.335 ± 0.036`, a dash for what is not there."""
    return "–" if np.isnan(value) else f"{value:.4g} ± {'–' if np.isnan(error) else format(error, '.2g')}"
