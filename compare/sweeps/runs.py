"""What can be swept: our runs under flat names (length, snr, prior, heads, dim, …), and functions of the user's own.

A run is given several points that share all shapes, and returns what it found for each of them.
"""

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

import sim
import theory as th
from compare.agreement import agreement
from compare.sweeps.identity import canonical, digest
from sim.many import train_many, train_reduced_many
from theory._checks import invalid, whole
from theory.many import bayes_risks, gradient_flows, population_risks
from theory.method import default_method

Values = Mapping[str, Any]
Points = Sequence[Values]
Keys = Sequence[Any]  # typed keys; None for runs that take none
REQUIRED = inspect.Parameter.empty
_START, _DATA = 0, 1  # purposes, folded into the key of a point
_FLOAT = 8.0  # bytes


class Run(NamedTuple):
    """A run and what is known about it.

    Attributes:
        name: for people and for the identity of points.
        parameters: names and defaults (`REQUIRED` without one); they are all the names there are.
        together: (points, keys) to what the run returns for each; the points share all that is not `shared`.
        random: whether it uses its key.
        shared: names whose values may differ without another compilation, as far as their shapes are the same.
        alone: whether points run one by one all the same.
        source: a digest of the code of a user's function, "" for ours.
        ours: whether it is one of ours.
        returned: parameters that share their name with a dimension or variable of what it returns.
        seconds: of a point, roughly, on a core; None if unknown.
        bytes: of memory that a point takes in a call, roughly.
    """

    name: str
    parameters: Mapping[str, Any]
    together: Callable[[Points, Keys], list[Any]]
    random: bool
    shared: frozenset[str] = frozenset()
    alone: bool = False
    source: str = ""
    ours: bool = True
    returned: frozenset[str] = frozenset()
    seconds: Callable[[Values], float] | None = None
    bytes: Callable[[Values], float] = lambda values: 2.0**20

    def cost(self, values: Values) -> tuple[float | None, float]:
        """Seconds and bytes; those of nothing for values that cannot be right, which the run itself will refuse."""
        try:
            return None if self.seconds is None else float(self.seconds(values)), float(self.bytes(values))
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
            return 0.0, 1.0

    def shape(self, values: Values) -> str:
        """Equal for points that share compiled code."""
        found = [
            [name, _structure(value) if name in self.shared else canonical(name, value)]
            for name, value in sorted(values.items())
        ]
        return digest(found)


def run_of(function: Callable[..., Any]) -> Run:
    """The run behind a function of ours or of the user's own.

    Raises:
        ValueError: not a function, or one whose parameters have no names.
    """
    if function in _OURS:
        return _OURS[function]
    if not callable(function):
        raise invalid("run", "one of our runs or a function", repr(function))
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise invalid("run", "a function whose parameters all have names", f"parameter {parameter}")

    def one_by_one(points: Points, keys: Keys) -> list[Any]:
        given = [{"key": key} if "key" in parameters else {} for key in keys]
        return [function(**values, **key) for values, key in zip(points, given, strict=True)]

    named = getattr(function, "func", function)
    module = getattr(named, "__module__", "")
    if module == "__main__":  # the same function when the file is imported
        module = Path(inspect.getfile(named)).stem
    source = _source(named)
    if isinstance(function, functools.partial) and function.args:  # bound by position: no parameters any more
        source = digest([source, canonical("run", function.args)])
    return Run(
        name=f"{module}:{getattr(named, '__qualname__', type(named).__qualname__)}",
        parameters={name: p.default for name, p in parameters.items() if name != "key"},
        together=one_by_one,
        random="key" in parameters,
        source=source,
        alone=True,
        ours=False,
    )


def _source(function: Callable[..., Any]) -> str:
    """A digest of the code, blind to comments and layout; "" if there is none to read."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    with contextlib.suppress(SyntaxError):  # a lambda in the middle of a line
        text = ast.unparse(ast.parse(text))
    return digest(text)


def _structure(value: Any) -> Any:
    """What compiled code depends on."""
    leaves, tree = jax.tree.flatten(value)
    return [str(tree), [list(np.shape(leaf)) for leaf in leaves]]


def _task(values: Values) -> th.SingleLocation:
    return th.SingleLocation(values["length"], values["snr"], values["prior"])


def _tasks(points: Points) -> list[th.SingleLocation]:
    """The task of each point; a ν that many share becomes an array once."""
    array = functools.cache(lambda snr: jnp.asarray(snr, jnp.float64))
    return [_task({**v, "snr": array(v["snr"])} if type(v["snr"]) is float else v) for v in points]


def _start(values: Values, key: Any) -> th.OrderParameters:
    """Order parameters at the start, drawn with the key unless they are given."""
    order = values.get("order")
    if isinstance(order, Mapping):
        if set(order) != {"m", "r"}:
            raise invalid("order", "m and r", sorted(order))
        return th.OrderParameters(order["m"], order["r"])
    if order is not None:
        return order
    for name in ("heads", "dim"):
        if values[name] is None:
            raise invalid(name, "a number, or `order` in place of heads, dim and variance", None)
    assert key is not None
    return th.OrderParameters.initial(
        jax.random.fold_in(key, _START),
        heads=values["heads"],
        features=values["prior"].features,
        dim=values["dim"],
        variance=values["variance"],
    )


def _bayes_risk(points: Points, keys: Keys) -> list[Any]:
    method = th.Quadrature(points[0]["tolerance"])
    return _risks(*bayes_risks(_tasks(points), method=method))


def _population_risk(points: Points, keys: Keys) -> list[Any]:
    activations = [values["activation"] for values in points]
    method = default_method(activations[0], points[0]["tolerance"])
    orders = [_start(values, key) for values, key in zip(points, keys, strict=True)]
    return _risks(*population_risks(_tasks(points), activations, orders, method=method))


def _risks(risks: Array, errors: Array) -> list[Any]:
    """NaN is a failure."""
    found = np.stack([np.asarray(risks), np.asarray(errors)], axis=1).tolist()
    beyond = ValueError("tolerance: no number of nodes that is allowed reaches it here; loosen it")
    return [beyond if np.isnan(risk) else {"risk": risk, "error": error} for risk, error in found]


def _gradient_flow(points: Points, keys: Keys) -> list[Any]:
    first = points[0]
    return gradient_flows(
        _tasks(points),
        [values["activation"] for values in points],
        [_start(values, key) for values, key in zip(points, keys, strict=True)],
        first["times"],
        step_size=np.array([float(values["step_size"]) for values in points]),
        bias_rate=first["bias_rate"],
        scale_rate=first["scale_rate"],
        tolerance=first["tolerance"],
        progress=False,
    )


def _optimal_risk(points: Points, keys: Keys) -> list[Any]:
    return [
        th.optimal_risk(
            _task(values),
            values["activation"],
            values["heads"],
            starts=values["starts"],
            key=key,
            method=default_method(values["activation"], values["tolerance"]),
            progress=False,
        )
        for values, key in zip(points, keys, strict=True)
    ]


def _predict_stages(points: Points, keys: Keys) -> list[Any]:
    names = ("variance", "step_size", "bias_rate", "scale_rate", "threshold", "samples", "until")
    found = []
    for values in points:
        options = {name: values[name] for name in names}
        dim = whole("dim", values["dim"], 1)
        prediction = th.predict_stages(
            _task(values), values["activation"], values["heads"], dim, progress=False, **options
        )
        found.append(prediction.to_xarray().isel(dim=0, drop=True))
    return found


def _train(points: Points, keys: Keys) -> list[Any]:
    layers = [
        sim.MultiHeadAttention.initial(
            jax.random.fold_in(key, _START),
            heads=values["heads"],
            features=values["prior"].features,
            dim=values["dim"],
            variance=values["variance"],
            activation=values["activation"],
        )
        for values, key in zip(points, keys, strict=True)
    ]
    data = [jax.random.fold_in(key, _DATA) for key in keys]
    runs = train_many(_tasks(points), layers, data, **_sgd(points[0]))
    return _at_requested_times(runs, points[0])


def _train_reduced(points: Points, keys: Keys) -> list[Any]:
    runs = train_reduced_many(
        _tasks(points),
        [values["activation"] for values in points],
        [_start(values, key) for values, key in zip(points, keys, strict=True)],
        [jax.random.fold_in(key, _DATA) for key in keys],
        dim=points[0]["dim"],
        **_sgd(points[0]),
    )
    return _at_requested_times(runs, points[0])


def _sgd(values: Values) -> dict[str, Any]:
    """Options that both simulators have."""
    names = ("learning_rate", "time", "batch", "record", "loss", "bias_rate", "scale_rate", "evaluation")
    return {**{name: values[name] for name in names}, "progress": False}


def _at_requested_times(runs: Sequence[th.Trajectory], values: Values) -> list[Any]:
    """The trajectories, which carry on their failures, with what `to_xarray` is to call its times."""
    record = values["record"]
    times = np.linspace(0, float(values["time"]), record) if np.ndim(record) == 0 else np.asarray(record, float)
    return [Recorded(run, times) for run in runs]


class Recorded(NamedTuple):
    """A simulated trajectory and the times that were asked for: the same for every D, unlike those of its steps."""

    trajectory: th.Trajectory
    times: np.ndarray

    def to_xarray(self) -> Any:
        """`time` is what was asked for, `tau` the exact clock of each record, at most half a step away."""
        data = self.trajectory.to_xarray()
        tau = data["time"].variable
        data = data.assign_coords(time=("time", self.times, {"long_name": "clock τ asked for"}))
        return data.assign(tau=("time", tau.values, {"long_name": "clock τ = η·steps/D of the record"}))


def _agreement(points: Points, keys: Keys) -> list[Any]:
    return [_verdict(values, key) for values, key in zip(points, keys, strict=True)]


def _verdict(values: Values, key: Key[Array, ""]) -> Any:
    """Simulates, solves the theory from the same starts, and compares."""
    task, activation, replicas = _task(values), values["activation"], whole("replicas", values["replicas"], 2)
    start, data = jax.random.fold_in(key, _START), jax.random.fold_in(key, _DATA)
    options = {"heads": values["heads"], "features": task.features, "dim": values["dim"], "replicas": replicas}
    options["variance"] = values["variance"]
    if values["simulator"] == "train":
        layer = sim.MultiHeadAttention.initial(start, activation=activation, **options)
        order, run = layer.order(), sim.train(task, layer, key=data, throw=False, **_sgd(values))
    elif values["simulator"] == "train_reduced":
        order = th.OrderParameters.initial(start, **options)
        run = sim.train_reduced(task, activation, order, dim=values["dim"], key=data, throw=False, **_sgd(values))
    else:
        raise invalid("simulator", "'train' or 'train_reduced'", repr(values["simulator"]))
    if np.any(np.asarray(run.result) == th.Result.interrupted):
        raise KeyboardInterrupt
    flow = th.gradient_flow(
        task,
        activation,
        order,
        run.time,
        step_size=values["learning_rate"] / values["batch"],
        bias_rate=values["bias_rate"],
        scale_rate=values["scale_rate"],
        progress=False,
        throw=False,
    )
    return agreement(flow, run, until=values["until"], level=values["level"])


def _records(values: Values) -> Any:
    record = values["record"]
    return record if np.ndim(record) == 0 else np.size(record)


def _samples(values: Values) -> float:
    return float(values["time"]) * values["dim"] / values["learning_rate"] * values["batch"]


def _train_seconds(values: Values) -> float:
    return _samples(values) * values["length"] * values["dim"] / 2.5e8  # normals a second on a core


def _reduced_seconds(values: Values) -> float:
    return _samples(values) * values["length"] * (values["prior"].features + values["heads"]) / 3.5e7


def _trajectory_bytes(values: Values, records: Any) -> float:
    heads, features = values["heads"] or 1, values["prior"].features
    return _FLOAT * 4 * records * (heads * features + heads**2 + 4)


def _train_bytes(values: Values) -> float:
    return _trajectory_bytes(values, _records(values)) + 3 * 4 * values["heads"] * values["dim"] + 2.0**20


def _reduced_bytes(values: Values) -> float:
    numbers = values["batch"] * values["length"] * (values["prior"].features + 2 * values["heads"])
    return _trajectory_bytes(values, _records(values)) + 30 * numbers


_POINT = {"length": REQUIRED, "snr": REQUIRED, "prior": REQUIRED}
_LAYER = {**_POINT, "activation": th.Softmax(), "heads": REQUIRED}
_RATES = {"bias_rate": 1.0, "scale_rate": 1.0}
_SGD = {
    **_LAYER, "dim": REQUIRED, "variance": 1.0, "learning_rate": REQUIRED, "time": REQUIRED, "batch": REQUIRED,
    "record": 31, "loss": "finite", **_RATES, "evaluation": 1000,
}  # fmt: skip
_RETURNED = frozenset({"time", "loss"})
_OURS: dict[Callable[..., Any], Run] = {
    th.bayes_risk: Run(
        "bayes_risk", {**_POINT, "tolerance": 1e-6}, _bayes_risk, random=False,
        shared=frozenset(_POINT), seconds=lambda v: 3e-4 * 8 ** (v["prior"].features - 1), bytes=lambda v: 2.0**12,
    ),
    th.population_risk: Run(
        "population_risk", {**_POINT, "activation": th.Softmax(), "order": REQUIRED, "tolerance": None},
        _population_risk, random=False, shared=frozenset({*_POINT, "activation", "order"}), seconds=lambda v: 1e-3,
        bytes=lambda v: 2.0**12,
    ),
    th.gradient_flow: Run(
        "gradient_flow",
        {**_LAYER, "heads": None, "dim": None, "variance": 1.0, "order": None, "times": REQUIRED, "step_size": 0.0,
         **_RATES, "tolerance": 1e-6},
        _gradient_flow, random=True, shared=frozenset({"snr", "prior", "activation", "variance", "order"}),
        seconds=lambda v: 1.0 if not v["step_size"] else 10.0,
        bytes=lambda v: _trajectory_bytes(v, np.size(v["times"])) + 2.0**20,
    ),
    th.optimal_risk: Run(
        "optimal_risk", {**_LAYER, "starts": 8, "tolerance": 1e-5}, _optimal_risk, random=True,
        shared=frozenset({"snr", "prior", "activation"}), alone=True, returned=frozenset({"starts"}),
        seconds=lambda v: 1.0 * v["starts"],
    ),
    th.predict_stages: Run(
        "predict_stages",
        {**_LAYER, "dim": REQUIRED, "variance": 1.0, "step_size": 0.0, **_RATES, "threshold": 0.25, "samples": 64,
         "until": None},
        _predict_stages, random=False, shared=frozenset({"snr", "prior", "activation", "variance", "step_size"}),
        alone=True, seconds=lambda v: 60.0,
    ),
    sim.train: Run(
        "train", _SGD, _train, random=True, shared=frozenset({"snr", "prior", "activation", "variance"}),
        returned=_RETURNED, seconds=_train_seconds, bytes=_train_bytes,
    ),
    sim.train_reduced: Run(
        "train_reduced", _SGD, _train_reduced, random=True,
        shared=frozenset({"snr", "prior", "activation", "variance"}), returned=_RETURNED,
        seconds=_reduced_seconds, bytes=_reduced_bytes,
    ),
    agreement: Run(
        "agreement", {**_SGD, "replicas": 8, "simulator": "train", "until": None, "level": 0.01}, _agreement,
        random=True, shared=frozenset({"snr", "prior", "activation", "variance"}), alone=True, returned=_RETURNED,
        seconds=lambda v: _train_seconds(v) * v["replicas"] + 20,
    ),
}  # fmt: skip
