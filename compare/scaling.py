"""How residuals shrink with D: the scatter of single replicas like D^-1/2, the systematic part of their mean faster."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from compare._residual import Residual
from compare.agreement import Agreement

NAMES = ("m", "r", "risk")
RESOLVED = 3.0  # standard errors of the squared mean residual that make it resolved
FEWEST_REPLICAS = 3  # for errors by leaving one out


class ResidualScaling(eqx.Module):
    """What `residual_scaling` finds; prints as a table. Q = 3 quantities (m, r, risk), N dimensions D.

    Attributes:
        dims: (N,) D, increasing.
        replicas: (N,) number of replicas.
        until: records with 0 < τ ≤ until are used, at every D.
        scatter: (Q, N) root mean square over replicas, records and components of the residuals less their mean.
        scatter_error: (Q, N) its standard error, clustered by replica.
        square: (Q, N) unbiased estimate of the squared mean residual, mean over records and components: the square
            less its variance, so that it may be negative.
        square_error: (Q, N) its standard error, by leaving out one replica at a time.
        scatter_slope: (Q,) of log scatter against log D.
        scatter_slope_error: (Q,) its standard error.
        mean_slope: (Q,) of the log root of `square`, from the D where it is resolved; NaN with fewer than two.
        mean_slope_error: (Q,) its standard error.
    """

    dims: Int[np.ndarray, " N"]
    replicas: Int[np.ndarray, " N"]
    until: float
    scatter: Float[np.ndarray, "Q N"]
    scatter_error: Float[np.ndarray, "Q N"]
    square: Float[np.ndarray, "Q N"]
    square_error: Float[np.ndarray, "Q N"]
    scatter_slope: Float[np.ndarray, " Q"]
    scatter_slope_error: Float[np.ndarray, " Q"]
    mean_slope: Float[np.ndarray, " Q"]
    mean_slope_error: Float[np.ndarray, " Q"]

    @property
    def resolved(self) -> Bool[np.ndarray, "Q N"]:
        """Whether the squared mean exceeds three of its standard errors."""
        return self.square > RESOLVED * self.square_error

    @property
    def mean(self) -> Float[np.ndarray, "Q N"]:
        """Root mean square mean residual where it is resolved, else NaN."""
        return np.sqrt(np.where(self.resolved, self.square, np.nan))

    @property
    def mean_error(self) -> Float[np.ndarray, "Q N"]:
        """Its standard error."""
        return self.square_error / (2 * self.mean)

    def to_xarray(self) -> xr.Dataset:
        """Dimensions quantity and dim; the report in `attrs`."""
        text = {
            "scatter": "root mean square residual of single replicas less their mean",
            "scatter_error": "standard error of scatter",
            "square": "unbiased estimate of the squared mean residual",
            "square_error": "standard error of square",
            "mean": "root of square where it is resolved",
            "mean_error": "standard error of mean",
            "scatter_slope": "slope of log scatter against log D",
            "scatter_slope_error": "standard error of scatter_slope",
            "mean_slope": "slope of log mean against log D",
            "mean_slope_error": "standard error of mean_slope",
        }
        data = {}
        for name, meaning in text.items():
            values = getattr(self, name)
            data[name] = (("quantity", "dim")[: values.ndim], values, {"long_name": meaning})
        data["replicas"] = ("dim", self.replicas, {"long_name": "number of replicas"})
        coords = {"quantity": list(NAMES), "dim": self.dims}
        return xr.Dataset(data, coords=coords, attrs={"until": float(self.until), "report": str(self)})

    def __str__(self) -> str:
        lines = [
            f"Residuals against D, 0 < τ ≤ {self.until:.4g}: scatter of single replicas (expected slope -1/2) and "
            "systematic part of the mean (faster)",
            f"  {'':6}{'':10}" + "".join(f"{f'D = {dim}':>19}" for dim in self.dims) + f"{'slope':>17}",
        ]
        for q, name in enumerate(NAMES):
            rows = (
                ("scatter", self.scatter[q], self.scatter_error[q], self.scatter_slope[q], self.scatter_slope_error[q]),
                ("mean", self.mean[q], self.mean_error[q], self.mean_slope[q], self.mean_slope_error[q]),
            )
            for what, values, errors, slope, error in rows:
                cells = [
                    f"{value:.3g} ± {off:.2g}" if np.isfinite(value) else "not resolved"
                    for value, off in zip(values, errors, strict=True)
                ]
                end = f"{slope:.3f} ± {error:.3f}" if np.isfinite(slope) else "not resolved"
                lines.append(f"  {name:6}{what:10}" + "".join(f"{cell:>19}" for cell in cells) + f"{end:>17}")
                name = ""
        lines.append(
            f"  replicas {', '.join(map(str, self.replicas))}; not resolved: squared mean below {RESOLVED:g} of its "
            "standard errors"
        )
        return "\n".join(lines)


def residual_scaling(agreements: Sequence[Agreement], *, until: float | None = None) -> ResidualScaling:
    """Log-log slopes of scatter and mean residual against D, from agreements of one task at several D.

    The residuals of single replicas less their mean are fluctuations of order D^-1/2. The mean residual is systematic:
    of order 1/D by the finite-D loss and by curvature. Its square averaged over records and components is estimated
    without bias, as the mean product of the residuals of two different replicas. Slopes are weighted least squares of
    the logarithms, with the standard errors of the points, which are independent.

    Args:
        agreements: at two or more D, with at least three replicas each and the same records.
        until: records with 0 < τ ≤ until are used; by default those that all agreements judge.

    Raises:
        ValueError: fewer than two D, too few replicas, or agreements that do not belong together.

    Example:
        `residual_scaling([agreement(flow, run) for flow, run in pairs])`
    """
    if len({one.dim for one in agreements}) < 2:
        raise ValueError(f"agreements: expected at least two different D, got {[one.dim for one in agreements]}")
    agreements = sorted(agreements, key=lambda one: one.dim)
    first = agreements[0]
    for one in agreements:
        if one.replicas < FEWEST_REPLICAS:
            raise ValueError(f"agreements: expected at least {FEWEST_REPLICAS} replicas, got {one.replicas}")
        if one["m"].mean.shape != first["m"].mean.shape or np.any(np.abs(one.time - first.time) > _off(one, first)):
            raise ValueError("agreements: expected the same heads, features and records (to a step), got others")
        for name in ("length", "snr", "prior", "activation", "loss", "step_size"):
            ours, theirs = first.configuration[name], one.configuration[name]
            if ours != theirs:
                raise ValueError(f"{name}: expected the same in all agreements, got {ours} and {theirs}")
    until = min(one.until for one in agreements) if until is None else float(until)
    used = (first.time > 0) & (first.time <= until * (1 + 1e-9))
    if not used.any():
        raise ValueError(f"until: expected records in 0 < τ ≤ until, got {until:g}")
    found = np.array([[_parts(one[name], used) for one in agreements] for name in NAMES])  # (Q, N, 4)
    scatter, scatter_error, square, square_error = np.moveaxis(found, -1, 0)
    dims = np.array([one.dim for one in agreements])
    slopes = []
    for q in range(len(NAMES)):
        some = scatter[q] > 0
        slopes.append(_slope(dims[some], np.log(scatter[q, some]), (scatter_error[q] / scatter[q])[some]))
        some = square[q] > RESOLVED * square_error[q]
        slopes.append(_slope(dims[some], np.log(square[q, some]) / 2, square_error[q, some] / (2 * square[q, some])))
    fits = np.array(slopes).reshape(len(NAMES), 2, 2)
    replicas = np.array([one.replicas for one in agreements])
    return ResidualScaling(
        dims, replicas, until, scatter, scatter_error, square, square_error,
        fits[:, 0, 0], fits[:, 0, 1], fits[:, 1, 0], fits[:, 1, 1],
    )  # fmt: skip


def _off(one: Agreement, other: Agreement) -> float:
    """Records lie on whole steps: how far those of one time may be apart."""
    return sum(x.configuration["learning_rate"] / x.dim for x in (one, other))


def _parts(residual: Residual, used: np.ndarray) -> tuple[float, float, float, float]:
    """Scatter, its error, squared mean without bias, its error."""
    d = residual.each[:, used]
    if residual.name == "r":
        d = d[..., *np.triu_indices(d.shape[-1])]
    d = d.reshape(len(d), d.size // len(d))
    count = len(d)
    own = np.mean((d - d.mean(axis=0)) ** 2, axis=1) * count / (count - 1)
    scatter = float(np.sqrt(own.mean()))
    products = d @ d.T / d.shape[1]
    each, rows = np.diagonal(products), products.sum(axis=1)
    total = rows.sum() - each.sum()  # over pairs of different replicas
    square = total / (count * (count - 1))
    without = (total - 2 * (rows - each)) / ((count - 1) * (count - 2))
    square_error = float(np.sqrt((count - 1) / count * np.sum((without - without.mean()) ** 2)))
    error = float(np.std(own, ddof=1)) / count**0.5 / (2 * scatter) if scatter > 0 else float("nan")
    return scatter, error, float(square), square_error


def _slope(dims: np.ndarray, logs: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Weighted least squares of a straight line in log D: slope and standard error."""
    if len(set(dims.tolist())) < 2:
        return float("nan"), float("nan")
    weight, x = errors**-2, np.log(dims)
    x = x - np.sum(weight * x) / weight.sum()
    square = np.sum(weight * x**2)
    return float(np.sum(weight * x * logs) / square), float(square**-0.5)
