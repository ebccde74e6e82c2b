"""Words and numbers that several reports print."""

import numpy as np


def plus_minus(value: float, error: float) -> str:
    """`1.335 ± 0.036`, a dash for what is not there."""
    return "–" if np.isnan(value) else f"{value:.4g} ± {'–' if np.isnan(error) else format(error, '.2g')}"
