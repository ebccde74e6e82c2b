"""The one result type of theory and simulators: order parameters, risk and loss against the clock τ."""

import enum
import json
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int

from theory._checks import leading_index
from theory.activation import Activation
from theory.order import OrderParameters
from theory.task import SingleLocation


class Result(enum.IntEnum):
    """How a run ended."""

    successful = 0
    diverged = 1  # a number stopped being finite
    stalled = 2  # the solver's step became too small, or its steps ran out
    interrupted = 3  # stopped by the user

    @property
    def message(self) -> str:
        return {
            Result.successful: "reached its end",
            Result.diverged: "diverged: a number stopped being finite",
            Result.stalled: "the solver ran out of steps",
            Result.interrupted: "interrupted by the user",
        }[self]


class RunFailed(RuntimeError):
    """A run that did not reach its end; `trajectory` keeps what it had (NaN after the failure)."""

    def __init__(self, message: str, trajectory: "Trajectory"):
        super().__init__(message)
        self.trajectory = trajectory


class Trajectory(eqx.Module):
    """Order parameters along a run, on the clock τ = η·steps/D.

    Everything at index t belongs to the same parameters, at `time[t]`. Leading axes "..." are replicas
    (none for a single run). Entries that a failed run never reached are NaN.

    Attributes:
        time: (T,) clock τ.
        order: m (..., T, H, F) and r (..., T, H, H).
        activation: the activation; its trained leaves carry the axes (..., T) before their own.
        risk: (..., T) population risk of `order` and `activation`, D → ∞, whatever produced the run.
        loss: (..., T) fresh-sample loss of a simulated run, None for theory.
        loss_error: (..., T) its standard error.
        result: (...) codes of `Result`.
        task: the task.
        settings: how the run was made (plain numbers and strings, exact); `activation` is its name at the start.
    """

    time: Float[Array, " T"]
    order: OrderParameters
    activation: Activation
    risk: Float[Array, "*batch T"]
    loss: Float[Array, "*batch T"] | None
    loss_error: Float[Array, "*batch T"] | None
    result: Int[Array, "*batch"]
    task: SingleLocation
    settings: tuple[tuple[str, Any], ...] = eqx.field(static=True, converter=lambda s: _frozen(s), default=())

    @property
    def replicas(self) -> int | None:
        """Number of replicas, None for a single run."""
        return None if self.risk.ndim == 1 else self.risk.shape[0]

    def __getitem__(self, replica: int) -> "Trajectory":
        """One replica as a single run."""
        if self.replicas is None:
            raise IndexError("this trajectory is a single run: it has no replica axis to index")
        replica = leading_index(replica, self.replicas)
        pick = lambda leaf: None if leaf is None else leaf[replica]  # noqa: E731
        trained, rest = self.activation.split()
        return Trajectory(
            self.time,
            self.order[replica],
            eqx.combine(jax.tree.map(pick, trained), rest),
            self.risk[replica],
            pick(self.loss),
            pick(self.loss_error),
            self.result[replica],
            self.task,
            self.settings,
        )

    def configuration(self) -> dict[str, Any]:
        """Task, activation at the start and settings in plain numbers and canonical names, exact."""
        settings = dict(self.settings)
        activation = settings.pop("activation", None) or self.activation.name
        return {**self.task.configuration(), "activation": activation, **settings}

    def _trained(self) -> dict[str, Float[Array, "..."]]:
        """What the activation trains, by name: one number or one per head (the last axis)."""
        return {name: getattr(self.activation, name) for name in self.activation.trained}

    def to_xarray(self) -> xr.Dataset:
        """Dimensions (replica,) time, head, head_, feature; the configuration as JSON in `attrs`.

        Variables `m`, `r`, `risk`, `result`; `bias` and `scale` if trained; `loss` and `loss_error` if simulated.
        """
        lead = () if self.replicas is None else ("replica",)
        features, heads = np.arange(self.order.features), np.arange(self.order.heads)
        data: dict[str, Any] = {
            "m": ((*lead, "time", "head", "feature"), self.order.m, "overlap of head and spike, k_h·k*_f/D"),
            "r": ((*lead, "time", "head", "head_"), self.order.r, "overlap of heads, k_h·k_h'/D"),
            "risk": ((*lead, "time"), self.risk, "population risk of the order parameters, D → ∞"),
            "result": (lead, self.result, "0 successful, 1 diverged, 2 stalled, 3 interrupted"),
        }
        for name, values in self._trained().items():
            own = ("head",) * (values.ndim - self.risk.ndim)
            data[name] = ((*lead, "time", *own), values, f"trained {name} of the activation")
        if self.loss is not None:
            data["loss"] = ((*lead, "time"), self.loss, "fresh-sample loss")
            data["loss_error"] = ((*lead, "time"), self.loss_error, "standard error of loss")
        return xr.Dataset(
            {name: (dims, np.asarray(values), {"long_name": text}) for name, (dims, values, text) in data.items()},
            coords={
                "time": ("time", np.asarray(self.time), {"long_name": "clock τ = η·steps/D"}),
                "head": heads,
                "head_": heads,
                "feature": features,
                **({"replica": np.arange(self.replicas)} if self.replicas is not None else {}),
            },
            attrs={"configuration": json.dumps(self.configuration())},
        )

    def __str__(self) -> str:
        replicas = "" if self.replicas is None else f"{self.replicas} replicas, "
        codes = np.unique(np.asarray(self.result))
        columns = {"risk": self.risk, **({} if self.loss is None else {"loss": self.loss}), **self._trained()}
        over = [] if self.replicas is None else ["replicas"]
        over += ["heads"] if any(column.ndim > self.risk.ndim for column in columns.values()) else []
        lines = [
            f"Trajectory: {replicas}{self.time.shape[0]} times, τ = {float(self.time[0]):g} … "
            f"{float(self.time[-1]):g}, {self.order.heads} heads, {self.order.features} features",
            f"  {', '.join(f'{name}={value}' for name, value in self.configuration().items())}",
            f"  {'; '.join(Result(int(code)).message for code in codes)}",
            f"{'τ':>8}"
            + "".join(f"{name:>10}" for name in columns)
            + (f"   (means over {' and '.join(over)})" if over else ""),
        ]
        for t in np.unique(np.linspace(0, self.time.shape[0] - 1, 6).astype(int)):
            means = [np.mean(np.take(np.asarray(column), t, axis=self.risk.ndim - 1)) for column in columns.values()]
            lines.append(f"{float(self.time[t]):8.3f}" + "".join(f"  {mean:8.5f}" for mean in means))
        return "\n".join(lines)


def _frozen(settings: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Settings as sorted pairs: hashable, so that a Trajectory is a well-behaved pytree."""
    return tuple(sorted(dict(settings).items()))
