"""The prior P_θ of the spikes' weights: finite Gaussian mixtures Σ_c w_c N(μ_c, Σ_c), Σ_c possibly 0.

Every prior stores the numbers a user gave and derives the mixture from them, so that changing a field
(or sweeping it) always changes the prior.
"""

import abc
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from theory._checks import invalid, is_concrete, non_negative, real_array, whole

_MOST_FLIPS = 12


def _numbers(value: Any) -> str:
    """An array as nested lists with every digit."""
    return repr(np.asarray(value).tolist())


class Prior(eqx.Module):
    """A law of θ in R^F, seen as a Gaussian mixture with C components.

    Subclasses give `weights` (C,), `means` (C, F), `covariances` (C, F, F) and `name`.
    """

    @property
    @abc.abstractmethod
    def weights(self) -> Float[Array, " C"]:
        """Probabilities of the components."""

    @property
    @abc.abstractmethod
    def means(self) -> Float[Array, "C F"]:
        """Their means."""

    @property
    @abc.abstractmethod
    def covariances(self) -> Float[Array, "C F F"]:
        """Their covariances."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Canonical name: the call that makes this prior, with every digit."""

    @property
    def features(self) -> int:
        """Number F of spikes."""
        return self.means.shape[-1]

    @property
    def components(self) -> int:
        """Number C of mixture components (support points when the prior is discrete)."""
        return self.means.shape[-2]

    def mean(self) -> Float[Array, " F"]:
        """E θ."""
        return self.weights @ self.means

    def covariance(self) -> Float[Array, "F F"]:
        """Cov θ, within and between components."""
        centred = self.means - self.mean()[None]
        between = jnp.einsum("c,cf,cg->fg", self.weights, centred, centred)
        return between + jnp.einsum("c,cfg->fg", self.weights, self.covariances)

    def variance(self) -> Float[Array, " F"]:
        """Var θ_f, which orders the specialization stages."""
        return jnp.diagonal(self.covariance())

    def sample(self, key: Key[Array, ""], count: int, dtype: Any = jnp.float64) -> Float[Array, "count F"]:
        """Independent draws of θ."""
        choice, normal = jax.random.split(key)
        component = jax.random.choice(choice, self.components, (count,), p=self.weights)
        values, vectors = jnp.linalg.eigh(self.covariances)
        root = vectors * jnp.sqrt(jnp.clip(values, 0))[:, None, :]
        noise = jax.random.normal(normal, (count, self.features), dtype)
        return self.means.astype(dtype)[component] + jnp.einsum("nfg,ng->nf", root.astype(dtype)[component], noise)

    def __str__(self) -> str:
        return self.name


class GaussianMixture(Prior):
    """The general prior: weights (C,), means (C, F), covariances (C, F, F).

    Components of weight zero are dropped; the rest is normalized, but only if it sums to one within 1e-6.

    Example:
        >>> GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [[[0.25]], [[0.25]]]).variance().tolist()
        [1.25]
    """

    weights_: Float[Array, " C"]
    means_: Float[Array, "C F"]
    covariances_: Float[Array, "C F F"]

    def __init__(self, weights: Any, means: Any, covariances: Any):
        weights = non_negative("weights", weights, 1)
        means = real_array("means", means, 2)
        covariances = real_array("covariances", covariances, 3)
        count, features = means.shape
        if count == 0 or features == 0:
            raise invalid("means", "at least one component and one feature", f"shape {means.shape}")
        if weights.shape != (count,):
            raise invalid("weights", f"shape ({count},) to match means {means.shape}", weights.shape)
        if covariances.shape != (count, features, features):
            raise invalid("covariances", f"shape {(count, features, features)} to match means", covariances.shape)
        if is_concrete(weights, means, covariances):
            kept = np.asarray(weights) > 0
            weights, means, covariances = _normalized(weights)[kept], means[kept], covariances[kept]
            _check_covariances(np.asarray(covariances))
        self.weights_, self.means_ = weights, means
        self.covariances_ = (covariances + jnp.swapaxes(covariances, -1, -2)) / 2

    @property
    def weights(self) -> Float[Array, " C"]:
        return self.weights_

    @property
    def means(self) -> Float[Array, "C F"]:
        return self.means_

    @property
    def covariances(self) -> Float[Array, "C F F"]:
        return self.covariances_

    @property
    def name(self) -> str:
        return (
            f"GaussianMixture(weights={_numbers(self.weights)}, means={_numbers(self.means)}, "
            f"covariances={_numbers(self.covariances)})"
        )


class Discrete(Prior):
    """Support points (C, F) with weights (C,); made by `discrete`."""

    points: Float[Array, "C F"]
    weights_: Float[Array, " C"]

    @property
    def weights(self) -> Float[Array, " C"]:
        return self.weights_

    @property
    def means(self) -> Float[Array, "C F"]:
        return self.points

    @property
    def covariances(self) -> Float[Array, "C F F"]:
        return jnp.zeros((*self.points.shape, self.points.shape[-1]))

    @property
    def name(self) -> str:
        return f"discrete(points={_numbers(self.points)}, weights={_numbers(self.weights)})"


class SignFlips(Prior):
    """θ_f = mean_f ± amplitude_f with independent signs; made by `sign_flips`."""

    mean_: Float[Array, " F"]
    amplitude: Float[Array, " F"]
    flipped: tuple[int, ...] = eqx.field(static=True)

    @property
    def features(self) -> int:  # known without making the means
        return self.mean_.shape[-1]

    @property
    def components(self) -> int:
        return 2 ** len(self.flipped)

    @property
    def weights(self) -> Float[Array, " C"]:
        return jnp.full(self.components, 0.5 ** len(self.flipped))

    @property
    def means(self) -> Float[Array, "C F"]:
        signs = np.zeros((self.components, self.features))
        signs[:, list(self.flipped)] = list(itertools.product([1.0, -1.0], repeat=len(self.flipped)))
        return self.mean_[None] + jnp.asarray(signs) * self.amplitude[None]

    @property
    def covariances(self) -> Float[Array, "C F F"]:
        return jnp.zeros((self.components, self.features, self.features))

    @property
    def name(self) -> str:
        return f"sign_flips(mean={_numbers(self.mean_)}, amplitude={_numbers(self.amplitude)})"


class OneHot(Prior):
    """θ = e_f with probability w_f; made by `one_hot`."""

    weights_: Float[Array, " F"]

    @property
    def weights(self) -> Float[Array, " F"]:
        return self.weights_

    @property
    def means(self) -> Float[Array, "C F"]:
        return jnp.eye(self.weights_.shape[-1])

    @property
    def covariances(self) -> Float[Array, "C F F"]:
        return jnp.zeros((self.weights_.shape[-1],) * 3)

    @property
    def name(self) -> str:
        return f"one_hot(features={self.features}, weights={_numbers(self.weights)})"


class Gaussian(Prior):
    """θ ~ N(mean, variance), variance a vector (diagonal) or a matrix; made by `gaussian`."""

    mean_: Float[Array, " F"]
    variance_: Float[Array, "..."]

    @property
    def features(self) -> int:  # known without making the means
        return self.mean_.shape[-1]

    @property
    def weights(self) -> Float[Array, " C"]:
        return jnp.ones(1)

    @property
    def means(self) -> Float[Array, "C F"]:
        return self.mean_[None]

    @property
    def covariances(self) -> Float[Array, "C F F"]:
        return (jnp.diag(self.variance_) if self.variance_.ndim == 1 else self.variance_)[None]

    @property
    def name(self) -> str:
        return f"gaussian(mean={_numbers(self.mean_)}, variance={_numbers(self.variance_)})"


def discrete(points: Any, weights: Any = None) -> Discrete:
    """θ at the given support points (C, F), equally likely unless weights (C,) are given.

    Example:
        >>> discrete([[1.0, 0.0], [0.0, 2.0]], [0.25, 0.75]).mean().tolist()
        [0.25, 1.5]
    """
    points = real_array("points", points, 2)
    if points.size == 0:
        raise invalid("points", "at least one point and one feature", f"shape {points.shape}")
    if weights is None:
        weights = np.full(points.shape[0], 1 / points.shape[0])
    mixture = GaussianMixture(weights, points, jnp.zeros((*points.shape, points.shape[-1])))
    return Discrete(mixture.means, mixture.weights)


def sign_flips(mean: Any, amplitude: Any) -> SignFlips:
    """θ_f = mean_f ± amplitude_f, independent fair signs: 2^(number of non-zero amplitudes) support points.

    Example:
        >>> prior = sign_flips(mean=[2, 0, 0], amplitude=[0, 2.5, 1.5])
        >>> prior.components, prior.variance().tolist()
        (4, [0.0, 6.25, 2.25])
    """
    mean, amplitude = real_array("mean", mean, 1), real_array("amplitude", amplitude, 1)
    if mean.shape != amplitude.shape or mean.size == 0:
        raise invalid("amplitude", f"one entry per entry of mean {mean.shape}, at least one", amplitude.shape)
    traced = not is_concrete(amplitude)  # which amplitudes vanish is then unknown: all may flip
    flipped = tuple(f for f in range(amplitude.shape[0]) if traced or float(amplitude[f]) != 0)
    if len(flipped) > _MOST_FLIPS:
        raise invalid("amplitude", f"at most {_MOST_FLIPS} non-zero entries (2^n support points)", len(flipped))
    return SignFlips(mean, amplitude, flipped)


def one_hot(features: int, weights: Any = None) -> OneHot:
    """θ = e_f with probability weights_f (default 1/F): F support points.

    Example:
        >>> one_hot(2).means.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    features = whole("features", features, 1)
    weights = non_negative("weights", np.full(features, 1 / features) if weights is None else weights, 1)
    if weights.shape != (features,):
        raise invalid("weights", f"shape ({features},)", weights.shape)
    return OneHot(_normalized(weights) if is_concrete(weights) else weights)


def gaussian(mean: Any, variance: Any) -> Gaussian:
    """θ ~ N(mean, variance); variance (F,) for independent entries or a covariance matrix (F, F).

    Example:
        >>> gaussian([0.0, 0.0], [1.0, 4.0]).variance().tolist()
        [1.0, 4.0]
    """
    mean, variance = real_array("mean", mean, 1), real_array("variance", variance, (1, 2))
    if mean.size == 0 or variance.shape not in ((mean.size,), (mean.size, mean.size)):
        raise invalid("variance", f"shape ({mean.size},) or ({mean.size}, {mean.size})", variance.shape)
    if is_concrete(variance):
        _check_covariances(np.asarray(variance if variance.ndim == 2 else jnp.diag(variance))[None], "variance")
    return Gaussian(mean, variance)


def _normalized(weights: Float[Array, " C"]) -> Float[Array, " C"]:
    """Weights that sum to one up to rounding; those that do already stay what they are, so that names are read back."""
    plain = np.asarray(weights).tolist()
    total = math.fsum(plain)
    if abs(total - 1) > 1e-6:
        raise invalid("weights", "a sum of 1 (within 1e-6)", f"{plain}, sum {total}")
    return weights if abs(total - 1) <= len(plain) * np.finfo(float).eps else weights / total


def _check_covariances(covariances: np.ndarray, name: str = "covariances") -> None:
    scale = np.trace(covariances, axis1=-2, axis2=-1)
    if np.any(np.abs(covariances - np.swapaxes(covariances, -1, -2)) > 1e-10 * np.abs(scale)[:, None, None]):
        raise invalid(name, "symmetric matrices", covariances.tolist())
    least = np.linalg.eigvalsh(covariances).min(axis=-1)
    if np.any(least < -1e-10 * np.abs(scale)):
        raise invalid(name, "positive semi-definite matrices", f"least eigenvalue {least.min()}")
