"""Chi-square test of counts against a distribution."""

import numpy as np
from scipy.stats import chisquare

P_VALUE = 1e-6
"""p-value below which counts do not follow the distribution. Seeds are fixed: a check that passes once always does."""


def check_counts(counts: np.ndarray, probabilities: np.ndarray, what: object) -> None:
    """Chi-square of counts [K] against probabilities [K]; categories that are rarely expected are pooled."""
    total = counts.sum()
    expected = probabilities * total
    outside = np.flatnonzero((expected == 0) & (counts > 0))
    assert len(outside) == 0, f"{what}: drew {outside.tolist()}, which the rules exclude"
    common = expected >= 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:
        # Too rare to judge by themselves: they are added to the last of the common ones.
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    assert len(expected) > 1, f"{what}: {total} draws of one category show nothing"
    p_value = chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue
    worst = int(np.abs(observed - expected).argmax())
    assert p_value > P_VALUE, (
        f"{what}: p-value {p_value:.1e} of {total} draws; one category has {observed[worst]} for {expected[worst]:.0f}"
    )
