"""Plain NumPy Monte Carlo of the population risk. Shares no code with the package."""

import numpy as np


def softmax(chi):
    """Attention a (..., L) of scores (..., L, H) from heads e^χ / Σ e^χ."""
    e = np.exp(chi - chi.max(-2, keepdims=True))
    return (e / e.sum(-2, keepdims=True)).mean(-1)


def softmax1(bias, scale):
    """Attention a (..., L) of scores (..., L, H) from heads c e^χ / (e^b + Σ e^χ)."""

    def attention(chi):
        heads = chi.shape[-1]
        b = np.broadcast_to(np.asarray(bias, float), (heads,))
        top = np.maximum(chi.max(-2), b)[..., None, :]
        e = np.exp(chi - top)
        sigma = e / (np.exp(b - top) + e.sum(-2, keepdims=True))
        return (sigma * np.broadcast_to(np.asarray(scale, float), (heads,))).mean(-1)

    return attention


def bayes_softmax(bias):
    """Attention of heads with one normalizer."""

    def attention(chi):
        y = chi - np.asarray(bias, float)
        e = np.exp(y - y.max((-2, -1), keepdims=True)).sum(-1)
        return e / e.sum(-1, keepdims=True)

    return attention


def sampled_risks(task, order, attentions, samples, seed):
    """(mean, standard error) of the loss for each attention, all on the same draws of θ and the scores."""
    rng = np.random.default_rng(seed)
    prior, length = task.prior, int(task.length)
    w, mu, cov = (np.asarray(a) for a in (prior.weights, prior.means, prior.covariances))
    m, r = np.asarray(order.m), np.asarray(order.r)
    heads = len(m)

    def root(s):
        values, vectors = np.linalg.eigh(s)
        return vectors * np.sqrt(np.clip(values, 0, None))

    noise_root, theta_root = root(r), np.stack([root(c) for c in cov])
    totals = np.zeros((len(attentions), 2))
    chunk = max(1, 500_000 // (length * heads))
    for first in range(0, samples, chunk):
        n = min(chunk, samples - first)
        component = rng.choice(len(w), p=w, size=n)
        theta = mu[component] + np.einsum("nfg,ng->nf", theta_root[component], rng.standard_normal((n, mu.shape[1])))
        chi = rng.standard_normal((n, length, heads)) @ noise_root.T
        chi[:, 0] += np.sqrt(float(task.snr)) * theta @ m.T
        for total, attention in zip(totals, attentions, strict=True):
            miss = attention(chi)
            miss[:, 0] -= 1
            loss = (miss**2).sum(1)
            total += loss.sum(), (loss**2).sum()
    means = totals[:, 0] / samples
    return [
        (mean, np.sqrt((square / samples - mean**2) / samples))
        for mean, square in zip(means, totals[:, 1], strict=True)
    ]


def finite_difference(f, x, direction, step, sides="both"):
    """Fourth-order derivative of f at x along direction; sides="inside" steps forward only, as at a cone's edge."""
    import jax

    moves, weights = {
        "both": ((-2, -1, 1, 2), (1, -8, 8, -1)),
        "inside": ((0, 1, 2, 3, 4), (-25, 48, -36, 16, -3)),
    }[sides]
    shifted = [f(jax.tree.map(lambda a, d, s=s: a + s * step * d, x, direction)) for s in moves]
    return jax.tree.map(lambda *each: sum(w * y for w, y in zip(weights, each, strict=True)) / (12 * step), *shifted)
