"""Metrics against values computed by hand, and against scikit-learn and scipy where they are installed."""

from __future__ import annotations

import numpy as np
import pytest

from whet.jobs import metrics

TOLERANCE = 1e-12
"""Both sides compute in float64 with sums of a few hundred numbers."""


def test_single_label_metrics_by_hand() -> None:
    """Class 0: 2 of 3 found, nothing else taken for it (F1 0.8); class 1: F1 0.8; class 2: F1 1; class 3 is absent."""
    expected, found = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 2])
    values = metrics.single_label(expected, found, 4)
    assert values["accuracy"] == pytest.approx(5 / 6, abs=TOLERANCE)
    assert values["f1_macro"] == pytest.approx((0.8 + 0.8 + 1) / 3, abs=TOLERANCE)
    # (c s - sum p t) / sqrt((s^2 - sum p^2)(s^2 - sum t^2)) with c 5, s 6, t (3, 2, 1), p (2, 3, 1)
    assert values["matthews_correlation"] == pytest.approx((30 - 13) / 22, abs=TOLERANCE)


def test_matthews_of_one_predicted_class_is_zero() -> None:
    assert metrics.single_label(np.array([0, 1, 1]), np.array([1, 1, 1]), 2)["matthews_correlation"] == 0.0


def test_multi_label_metrics_by_hand() -> None:
    """Three hits of four found and four expected; label 2 occurs nowhere and counts as 0 in the macro mean."""
    expected = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]], dtype=bool)
    found = np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0]], dtype=bool)
    values = metrics.multi_label(expected, found)
    assert values["f1_micro"] == pytest.approx(6 / 8, abs=TOLERANCE)
    assert values["f1_macro"] == pytest.approx((4 / 5 + 2 / 3 + 0) / 3, abs=TOLERANCE)
    assert values["accuracy"] == pytest.approx(1 / 3, abs=TOLERANCE)


def test_regression_metrics_by_hand() -> None:
    """Ranks with a tie: 1, 2.5, 2.5, 4 against 1, 2, 3, 4."""
    expected, found = np.array([1.0, 2.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0, 4.0])
    values = metrics.regression(expected, found)
    assert values["mse"] == pytest.approx(0.5, abs=TOLERANCE)
    assert values["pearson"] == pytest.approx(6 / np.sqrt(9 * 5), abs=TOLERANCE)
    assert values["spearmanr"] == pytest.approx(4.5 / np.sqrt(4.5 * 5), abs=TOLERANCE)


def test_correlation_with_a_constant_is_zero() -> None:
    assert metrics.regression(np.array([1.0, 2.0]), np.array([3.0, 3.0]))["pearson"] == 0.0


def test_classification_metrics_agree_with_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    numbers = np.random.default_rng(0)
    expected, found = numbers.integers(0, 7, 300), numbers.integers(0, 5, 300)
    values = metrics.single_label(expected, found, 9)
    assert values["f1_macro"] == pytest.approx(sklearn.f1_score(expected, found, average="macro"), abs=TOLERANCE)
    assert values["matthews_correlation"] == pytest.approx(sklearn.matthews_corrcoef(expected, found), abs=TOLERANCE)
    many, few = numbers.random((200, 6)) < 0.4, numbers.random((200, 6)) < 0.3
    several = metrics.multi_label(many, few)
    for average in ("micro", "macro"):
        wanted = sklearn.f1_score(many, few, average=average)
        assert several[f"f1_{average}"] == pytest.approx(wanted, abs=TOLERANCE)


def test_correlations_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    numbers = np.random.default_rng(1)
    x, y = numbers.integers(0, 9, 100).astype(float), numbers.normal(size=100)
    assert metrics.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=TOLERANCE)
    assert metrics.regression(x, y)["spearmanr"] == pytest.approx(stats.spearmanr(x, y).statistic, abs=TOLERANCE)
