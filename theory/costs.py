"""What silent and unaligned heads cost: the risk of subsets of heads, for every component of the prior.

Heads normalized each on its own enter the risk as a quadratic form, so one evaluation of E σ_hε and E Σ_ℓ σ_hℓ σ_h'ℓ
gives the risk of every subset S:

    E_S = 1 − 2 Σ_{h∈S} α_h E σ_hε + Σ_{h,h'∈S} α_h α_h' E Σ_ℓ σ_hℓ σ_h'ℓ,   α_h = 1/H (kept) or 1/|S| (renormalized).

With a joint normalizer (B-softmax) a removed head leaves the sum e^{χ−b} too, which is one evaluation per subset; the
attention Σ_{h∈S} e^{χ_hℓ−b_h}/Z does not know H, so both conventions are the same.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float

from theory import _heads, _joint
from theory._checks import invalid, is_concrete
from theory._nodes import bent_nodes
from theory.activation import Activation, BayesSoftmax, HeadNormalized
from theory.fit import head_grid, joint_grid, repeated
from theory.method import Method, Quadrature, default_method
from theory.order import OrderParameters
from theory.risk import check_model
from theory.scores import Scores, score_law
from theory.task import SingleLocation

SHARES = ("kept", "renormalized")
_REMOVED = 1e6  # added to the bias of a removed head: e^{−10⁶} = 0


class HeadCosts(eqx.Module):
    """The risk split into what the right heads miss and what the others add, and the cost of every head.

    Averages over the components c of the prior (support points of a discrete one), and values for each of them. The
    heads right for c are its aligned ones.

    Attributes:
        risk: the population risk.
        miss: risk if the aligned heads of the component drawn were alone, the others silent.
        injected: risk − miss, what the other heads add; negative where they help.
        cost: (H,) risk less the risk without the head: positive where the head does harm.
        component_risk: (C,) risk given the component, Σ_c w_c of it is `risk`.
        component_miss: (C,) likewise.
        component_injected: (C,) likewise.
        component_cost: (C, H) likewise.
        hit: (C, H) E[σ_hε | c], the head's weight on the informative token; (1/H) Σ_h of it is E[a_ε | c].
        aligned: (C, H) which heads count as aligned with which component.
        weights: (C,) w_c.
        activation: the activation.
        task: the task.
    """

    risk: Float[Array, ""]
    miss: Float[Array, ""]
    injected: Float[Array, ""]
    cost: Float[Array, " H"]
    component_risk: Float[Array, " C"]
    component_miss: Float[Array, " C"]
    component_injected: Float[Array, " C"]
    component_cost: Float[Array, "C H"]
    hit: Float[Array, "C H"]
    aligned: Bool[Array, "C H"]
    weights: Float[Array, " C"]
    activation: Activation
    task: SingleLocation

    def to_xarray(self) -> xr.Dataset:
        """Dimensions component, head; every field by its name."""
        described: dict[str, tuple[tuple[str, ...], str]] = {
            "risk": ((), "population risk"),
            "miss": ((), "risk of the aligned heads alone"),
            "injected": ((), "what the other heads add to it"),
            "cost": (("head",), "risk less the risk without the head"),
            "component_risk": (("component",), "risk given the component"),
            "component_miss": (("component",), "risk of its aligned heads alone"),
            "component_injected": (("component",), "what the other heads add to it"),
            "component_cost": (("component", "head"), "risk given the component less that without the head"),
            "hit": (("component", "head"), "weight of the head on the informative token"),
            "aligned": (("component", "head"), "whether the head is aligned with the component"),
            "weights": (("component",), "probability of the component"),
        }
        return xr.Dataset(
            {
                name: (dims, np.asarray(getattr(self, name)), {"long_name": text})
                for name, (dims, text) in described.items()
            },
            coords={"component": np.arange(self.weights.shape[0]), "head": np.arange(self.cost.shape[0])},
            attrs={**self.task.configuration(), "activation": self.activation.name},
        )

    def __str__(self) -> str:
        heads = self.cost.shape[0]
        lines = [
            f"Costs of {heads} heads, {type(self.activation).__name__}: risk {float(self.risk):.6f} = "
            f"miss {float(self.miss):.6f} + injected {float(self.injected):.6f}",
            f"{'component':>11}{'weight':>9}{'risk':>10}{'miss':>10}{'injected':>10}   cost of head "
            + "".join(f"{h + 1:>10}" for h in range(heads)),
        ]
        rows = zip(self.weights, self.component_risk, self.component_miss, self.component_injected, strict=True)
        for c, row in enumerate(rows):
            cells = [
                f"{float(x):9.5f}{'*' if a else ' '}"
                for x, a in zip(self.component_cost[c], self.aligned[c], strict=True)
            ]
            numbers = f"{float(row[0]):9.4f}" + "".join(f"{float(x):10.5f}" for x in row[1:])
            lines.append(f"{c + 1:>11}{numbers}{'':16}{''.join(cells)}")
        numbers = f"{1:9.4f}" + "".join(f"{float(x):10.5f}" for x in (self.risk, self.miss, self.injected))
        lines.append(f"{'all':>11}{numbers}{'':16}" + "".join(f"{float(x):9.5f} " for x in self.cost))
        return "\n".join([*lines, "  * aligned with the component"])


def head_costs(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    method: Method | None = None,
    aligned: Any = None,
) -> HeadCosts:
    """What a silent or unaligned head costs: the risk of subsets of heads, for every component of the prior.

    A head that is left out is silent: its weights are zero and the factor 1/H stays. Of B-softmax it leaves the
    normalizer too. A layer without heads has risk 1.

    Head h counts as aligned with component c if its mean score there, √ν m_h·μ_c, is positive and at least half of
    the best head's. A component with mean zero (such as one centred Gaussian) aligns no head by that rule: there all
    count as aligned, and nothing is injected.

    Args:
        task: the task.
        activation: softmax, softmax-1 or B-softmax.
        order: one state of known numbers (outside `jit`).
        method: `Quadrature`, as for `population_risk`; every component is integrated to its tolerance.
        aligned: (C, H) booleans in place of that rule.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=5, snr=16.0, prior=th.one_hot(2))
        >>> order = th.OrderParameters([[4.0, 0], [0, 4]], [[16.0, 0], [0, 16]])
        >>> costs = th.head_costs(task, th.Softmax(), order)
        >>> print(f"{costs.miss:.3f} {costs.injected:.3f}")
        0.260 0.081
        >>> costs.aligned.tolist()
        [[True, False], [False, True]]
    """
    risks = SubsetRisks(task, activation, order, method)
    aligned = _aligned(task, order) if aligned is None else _checked(aligned, (task.prior.components, order.heads))
    everything = np.ones(order.heads, bool)
    full = risks(everything)
    without = np.stack([risks(everything & (np.arange(order.heads) != h)) for h in range(order.heads)], axis=1)
    miss = np.array([risks(own)[c] for c, own in enumerate(aligned)])
    injected, cost = full - miss, full[:, None] - without
    weights, (full, miss, injected, cost) = task.prior.weights, map(jnp.asarray, (full, miss, injected, cost))
    return HeadCosts(
        risk=weights @ full,
        miss=weights @ miss,
        injected=weights @ injected,
        cost=weights @ cost,
        component_risk=full,
        component_miss=miss,
        component_injected=injected,
        component_cost=cost,
        hit=risks.hit(),
        aligned=jnp.asarray(aligned),
        weights=weights,
        activation=activation,
        task=task,
    )


class SubsetRisks:
    """The risk with some of the heads only, given each component of the prior; subsets are evaluated once.

    A call takes (H,) booleans, the heads kept, and what becomes of the factor 1/H; it returns (C,) risks.
    """

    def __init__(self, task: SingleLocation, activation: Activation, order: OrderParameters, method: Method | None):
        check_model(task, activation, order)
        if order.m.ndim != 2:
            raise invalid("order", "one state: m of shape (H, F)", f"m of shape {order.m.shape}")
        if not is_concrete(task, activation, order):
            raise invalid(
                "order", "known numbers: subsets of heads are not evaluated inside jit, grad or vmap", "traced values"
            )
        if not isinstance(activation, (HeadNormalized, BayesSoftmax)):
            raise invalid("activation", "softmax, softmax-1 or B-softmax", activation)
        method = default_method(activation) if method is None else method
        if not isinstance(method, Quadrature):
            raise invalid("method", "Quadrature(...) or None", repr(method))
        self._task, self._order, self._method = task, order, method
        self._found: dict[tuple[bytes, str], np.ndarray] = {}
        self._activation = activation.resolved(jnp.diagonal(order.r))
        if isinstance(activation, HeadNormalized):
            trained, rest = activation.split()
            grid = head_grid(method, task, rest, repeated((trained, order), (1,)))
            self._hit, overlap = _head_averages(task, activation, order, grid)
            self._form = np.asarray(self._hit), np.asarray(overlap)

    def __call__(self, kept: Bool[np.ndarray, " H"], share: str = "kept") -> Float[np.ndarray, " C"]:
        key = kept.tobytes(), share
        if key not in self._found:
            if not kept.any():  # nothing comes out
                self._found[key] = np.ones(self._task.prior.components)
            elif isinstance(self._activation, BayesSoftmax):
                activation, grid = self._among(kept)
                self._found[key] = np.asarray(_joint_risks(self._task, activation, self._order, grid))
            else:
                hit, overlap = self._form
                alpha = kept / (kept.size if share == "kept" else kept.sum())
                self._found[key] = 1 - 2 * hit @ alpha + overlap @ alpha @ alpha
        return self._found[key]

    def overall(self, kept: Bool[np.ndarray, " H"], share: str = "kept") -> float:
        """The average over the components."""
        return float(np.asarray(self._task.prior.weights) @ self(kept, share))

    def hit(self) -> Float[Array, "C H"]:
        """E[σ_hε | c] with all heads."""
        if isinstance(self._activation, BayesSoftmax):
            activation, grid = self._among(np.ones(self._order.heads, bool))
            return _joint_hits(self._task, activation, self._order, grid)
        return self._hit

    def _among(self, kept: np.ndarray) -> tuple[BayesSoftmax, _joint.Grid]:
        """B-softmax of these heads, and the nodes it needs."""
        assert isinstance(self._activation, BayesSoftmax)
        biases = np.asarray(self._activation.biases(self._order.heads)) + np.where(kept, 0.0, _REMOVED)
        activation = BayesSoftmax(biases, trained=True)
        trained, rest = activation.split()
        return activation, joint_grid(self._method, self._task, rest, repeated((trained, self._order), (1,)))


def _aligned(task: SingleLocation, order: OrderParameters) -> Bool[np.ndarray, "C H"]:
    mean = np.asarray(score_law(task, order).mean)
    centred = ~np.asarray(task.prior.means).any(axis=1, keepdims=True)
    return ((mean > 0) & (mean >= mean.max(axis=1, keepdims=True) / 2)) | centred


def _checked(aligned: Any, shape: tuple[int, int]) -> Bool[np.ndarray, "C H"]:
    aligned = np.asarray(aligned)
    if aligned.dtype != bool or aligned.shape != shape:
        raise invalid("aligned", f"booleans of shape {shape}", f"{aligned.dtype} of shape {aligned.shape}")
    return aligned


def _each_component(function: Any, scores: Scores) -> Any:
    """`function` of the scores given each component, one after the other."""

    def one(c: tuple[Array, Array]) -> Any:
        return function(scores._replace(weights=jnp.ones(1), mean=c[0][None], signal=c[1][None]))

    return jax.lax.map(one, (scores.mean, scores.signal))


@eqx.filter_jit
def _head_averages(
    task: SingleLocation, activation: HeadNormalized, order: OrderParameters, grid: _heads.Grid
) -> tuple[Float[Array, "C H"], Float[Array, "C H H"]]:
    """c_h E[σ_hε | c] and c_h c_h' E[Σ_ℓ σ_hℓ σ_h'ℓ | c]."""
    scores, form = _heads.law(task, activation, order)
    moments = _each_component(lambda own: _heads.head_moments(own, form.sink, grid), scores)
    scale = form.scale[:, None] * form.scale[None, :]
    return moments.hit * form.scale[None], moments.overlap * scale[None]


@eqx.filter_jit
def _joint_risks(
    task: SingleLocation, activation: BayesSoftmax, order: OrderParameters, grid: _joint.Grid
) -> Float[Array, " C"]:
    scores, biases = _joint.law(task, activation, order)
    return _each_component(lambda own: _joint.joint_risk(own, biases, grid), scores)


@eqx.filter_jit
def _joint_hits(
    task: SingleLocation, activation: BayesSoftmax, order: OrderParameters, grid: _joint.Grid
) -> Float[Array, "C H"]:
    """H E[p_h a_ε | c], p_h the head's share of e^{s_ε} = Σ_h e^{χ_hε − b_h}.

    1 − a_ε is the sum of the other weights, so E p_h a_ε = E p_h − (L−1) ∫ du E[p_h g(u+s_ε)] E[G(u+s)] φ^{L−2}.
    """
    scores, biases = _joint.law(task, activation, order)

    def component(own: Scores) -> Array:
        noise, signal, place, others = _joint.prepared(own, biases, grid)
        u, du = bent_nodes(*place, grid.nodes)
        other = logsumexp(_joint.principal_axes(own.noise) @ noise.z - biases[:, None], axis=0)
        x = (own.mean[0] - biases)[:, None] + _joint.principal_axes(own.signal[0]) @ signal.z[0]
        s = logsumexp(x, axis=0)
        share = jnp.exp(x - s[None]) * signal.weight[0][None]

        miss, g1 = _joint.tabulate(other, noise.weight[:, None, None], 2, u)[:, 0]
        seen = jnp.sum(share, axis=1)[:, None] - _joint.tabulate(s, share.T[:, None, :], 1, u)[0]
        rest = du * g1 * jnp.exp((others - 1) * jnp.log1p(-jnp.minimum(miss, 1 - 1e-13)))
        return order.heads * (jnp.sum(share, axis=1) - others * seen @ rest)

    return _each_component(component, scores)
