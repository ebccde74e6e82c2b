"""Tasks and states that the tests of the theory share."""

import jax.numpy as jnp
import numpy as np

import theory as th

# the worked case of the mathematics: L=10, H=4, ν=1, θ = (2, ±2.5, ±1.5)
FLIPS = th.sign_flips([2.0, 0.0, 0.0], [0.0, 2.5, 1.5])
WORKED = th.SingleLocation(length=10, snr=1.0, prior=FLIPS)

PRIORS = {
    "sign flips": FLIPS,
    "one hot": th.one_hot(3, [0.5, 0.3, 0.2]),
    "gaussian": th.gaussian([1.0, 0.0, 0.0], [0.0, 2.0, 1.0]),
    "mixture": th.GaussianMixture(
        [0.3, 0.7], [[1.0, 0.0, 0.5], [-1.0, 1.0, 0.0]], [np.diag([1.0, 0.5, 0.0]), 0.3 * np.eye(3)]
    ),
}


def random_state(seed: int, *, heads: int = 4, features: int = 3, m: float = 1.0, w: float = 0.5) -> th.OrderParameters:
    """Heads with spike coordinates of size m and orthogonal ones of size w."""
    rng = np.random.default_rng(seed)
    spikes = m * rng.standard_normal((heads, features))
    orthogonal = w * rng.standard_normal((heads, heads))
    return th.OrderParameters(spikes, spikes @ spikes.T + orthogonal @ orthogonal.T)


def worked_fixed_point() -> th.OrderParameters:
    """All heads at the calibrated optimum m = √ν E θ."""
    m = jnp.tile(jnp.array([[2.0, 0.0, 0.0]]), (4, 1))
    return th.OrderParameters(m, m @ m.T)


DEGENERATE = {
    "identical heads": worked_fixed_point(),
    "zero heads": th.OrderParameters(np.zeros((4, 3)), np.zeros((4, 4))),
    "r_perp = 0": th.OrderParameters(
        np.arange(12.0).reshape(4, 3) / 10, np.arange(12.0).reshape(4, 3) @ np.arange(12.0).reshape(4, 3).T / 100
    ),
    "one zero head": th.OrderParameters([[0.0, 0, 0], [1, 0.5, 0]], [[0.0, 0], [0, 2.0]]),
}
