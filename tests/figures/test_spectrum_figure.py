"""The figure of growth rates: its law, its measured rates, and what is drawn of them."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from compare import Store
from figures import spectrum as picture
from figures.spectrum import Configuration
from headsplit.figures import run

mpl.use("Agg")
TINY = Configuration(amplitudes=(2.5,), samples=2**16, heads=2)


def data(**values):
    return xr.Dataset({name: ("variance", x) for name, x in values.items()}, coords={"variance": [1.0, 4.0]})


@pytest.fixture
def store():
    """Rates of .01 per variance, measured 2 % too large with an error of 1 %, the second one unknown."""
    found = {
        "law": xr.Dataset({"slope": 0.0101, "slope_error": 1e-4}),
        "spectrum": data(rate=[0.01, 0.04], spread=[0.0, 1e-9]),
        "flow": data(rate=[0.01, 0.0404]),
        "chain": data(rate=[0.0102, np.nan], error=[0.0001, np.nan]),
    }

    configuration = {"length": 10, "heads": 4, "snr": 1.0, "mean": 2.0}
    return Store(Path("result.zarr"), found, configuration, {})


def test_the_law_is_that_of_the_worked_case():
    """docs/model.md §5: E S_εε = 0.02046062, here times 2/H."""
    found = picture.law(TINY)
    assert abs(float(found["slope"]) - 0.02046062) < 4 * float(found["slope_error"])


def test_a_split_is_measured_along_its_start_only():
    spectrum = xr.Dataset({"rate": ("variance", [0.1])})
    (start,) = picture._starts(TINY, spectrum, 0.02)
    split = np.asarray(start.m)[:, 1]
    np.testing.assert_allclose(np.linalg.norm(split), 0.02 * np.exp(-0.1 * TINY.time))
    assert split.sum() == 0
    m = np.stack([np.asarray(start.m), 3.0 * np.asarray(start.m) + [[0, 5.0]] * 2])  # a common move does not count

    class Run:
        class order:
            pass

    Run.order.m = m
    np.testing.assert_allclose(picture._growth(Run), 3.0)  # pyright: ignore


def test_heads_of_an_odd_number_split_with_zero_sum():
    spectrum = xr.Dataset({"rate": ("variance", [0.1])})
    (start,) = picture._starts(Configuration(amplitudes=(1.0,), heads=3), spectrum, 0.1)
    assert abs(float(start.m[:, 1].sum())) < 1e-15


def test_points_are_the_stored_ones(store):
    ax = picture.draw(store).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_array_equal(lines["flow, small split"].get_ydata(), [0.01, 0.0404])
    np.testing.assert_array_equal(lines["−eigenvalue of the Hessian"].get_ydata(), [0.01, 0.04])
    law = lines["(2/H) ν E[S$_{εε}$] Var θ"]
    np.testing.assert_allclose(law.get_ydata(), 0.0101 * law.get_xdata())
    (bars,) = ax.containers
    np.testing.assert_array_equal(bars[0].get_ydata(), [0.0102, np.nan])


def test_numbers_by_hand(store):
    found = picture.numbers(store)
    assert found["slope, Hessian, least"] == pytest.approx(0.01)
    assert found["flow/predicted, largest"] == pytest.approx(1.01)
    assert found["chain/predicted"] == pytest.approx(1.02)
    assert found["standard error of chain/predicted"] == pytest.approx(0.01)
    assert found["largest |chain − predicted| in standard errors"] == pytest.approx(2)


@pytest.mark.parametrize("wrong", [{"heads": 1}, {"mean": 0.0}, {"amplitudes": ()}, {"amplitudes": (0.0,)}])
def test_what_has_no_split_is_refused(wrong):
    with pytest.raises(ValueError, match="expected at least"):
        Configuration(**wrong).check()


@pytest.mark.slow
def test_flow_and_curvature_agree_end_to_end(tmp_path):
    found = run("spectrum", Configuration(amplitudes=(2.5,), replicas=2), tmp_path, progress=False, say=lambda _: None)
    assert found["slope, Hessian, least"] == pytest.approx(0.06393945 / 2.5**2, rel=1e-5)
    assert found["flow/predicted, least"] == pytest.approx(1, abs=2e-3)
