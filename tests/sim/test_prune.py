"""Pruning: population risks of the heads left, losses in NumPy, the search, the report, and the paper's pruning."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from sim import MultiHeadAttention, Pruning, prune_heads
from sim.prune import attention_of
from theory.costs import SHARES

TASK = th.SingleLocation(4, 3.0, th.sign_flips([1.0, 0.0], [0.0, 1.5]))
BIAS, SCALE, TEMPERATURE = np.array([0.5, 1.0, 2.0]), np.array([3.0, 2.0, 4.0]), np.array([1.0, 0.7, 1.4])
# counts beyond what any state here needs, so that all of one shape share compiled code
HEADS, JOINT = th.Quadrature(1e-7, nodes=96, frequencies=128), th.Quadrature(1e-6, nodes=64, points=(20, 32, 64))
CASES = {
    "softmax": (lambda kept: th.Softmax(TEMPERATURE[kept]), HEADS),
    "softmax-1": (lambda kept: th.Softmax1(BIAS[kept], SCALE[kept]), HEADS),
    "B-softmax": (lambda kept: th.BayesSoftmax(BIAS[kept]), JOINT),
}
ALL = np.arange(3)


def trained_layer(activation, dim=40):
    """A layer whose heads have found features, each in its own way."""
    keys = 0.4 * np.random.default_rng(3).standard_normal((3, dim))
    keys[:, :2] = np.sqrt(dim) * np.array([[1.2, 1.8], [1.0, -1.5], [0.3, 0.4]])
    return MultiHeadAttention(keys.astype(np.float32), features=2, activation=activation)


ORDER = trained_layer(th.Softmax()).order()


@pytest.fixture(scope="module", params=CASES)
def case(request):
    activation, method = CASES[request.param]
    return activation, method, prune_heads(TASK, ORDER, activation=activation(ALL), method=method)


def kept_at(pruning):
    """The heads left at each entry but the last."""
    return [np.setdiff1d(ALL, np.asarray(pruning.removed[:n])) for n in range(3)]


def remaining_risk(activation, kept, method):
    """Population risk of a layer that has these heads and no others."""
    order = th.OrderParameters(ORDER.m[kept], ORDER.r[np.ix_(kept, kept)])
    points = None if method.points is None else method.points[-len(kept) :]
    method = th.Quadrature(method.tolerance, method.nodes, method.frequencies, points)
    return float(th.population_risk(TASK, activation(kept), order, method))


def test_renormalized_heads_are_a_smaller_layer(case):
    activation, method, kept_share = case
    pruning = prune_heads(TASK, ORDER, activation=activation(ALL), method=method, share="renormalized")
    for n, kept in enumerate(kept_at(pruning)):
        assert float(pruning.risk[n]) == pytest.approx(remaining_risk(activation, kept, method), abs=3e-6)
    assert pruning.risk[3] == 1
    assert pruning.heads_left.tolist() == [3, 2, 1, 0]
    if isinstance(activation(ALL), th.BayesSoftmax):  # the share is nothing to it
        np.testing.assert_array_equal(pruning.risk, kept_share.risk)


def test_kept_share_is_a_scale_of_zero(case):
    activation, method, pruning = case
    if isinstance(activation(ALL), th.Softmax1):
        for n, kept in enumerate(kept_at(pruning)):
            silenced = th.Softmax1(BIAS, SCALE * np.isin(ALL, kept))
            expected = float(th.population_risk(TASK, silenced, ORDER, method))
            assert float(pruning.risk[n]) == pytest.approx(expected, abs=1e-6)
    assert float(pruning.risk[0]) == pytest.approx(remaining_risk(activation, ALL, method), abs=1e-6)
    assert pruning.risk[3] == 1


def test_search(case):
    activation, method, greedy = case
    options = {"activation": activation(ALL), "method": method}
    worst = prune_heads(TASK, ORDER, strategy="worst", **options)
    every = prune_heads(TASK, ORDER, strategy="random", orders=40, key=jax.random.key(1), **options)
    assert {tuple(each) for each in every.removed.tolist()} == set(itertools.permutations(range(3)))
    first = {int(each[0]): float(risk[1]) for each, risk in zip(every.removed, every.risk, strict=True)}
    assert int(greedy.removed[0]) == min(first, key=first.__getitem__)
    assert int(worst.removed[0]) == max(first, key=first.__getitem__)
    for pruning, best in ((greedy, min), (worst, max)):
        follow = [float(risk[2]) for each, risk in zip(every.removed, every.risk, strict=True)
                  if each[0] == pruning.removed[0]]  # fmt: skip
        assert float(pruning.risk[2]) == best(follow)
        assert sorted(pruning.removed.tolist()) == [0, 1, 2]
    again = prune_heads(TASK, ORDER, strategy="random", orders=5, key=jax.random.key(1), **options)
    np.testing.assert_array_equal(again.removed, every.removed[:5])


# --- the finite-D loss -----------------------------------------------------------------------------------------------


def losses_written_out(activation, layer, subsets, share, samples):
    """Mean and standard error of ‖X_ε − f(X)‖²/D for each subset of heads, in NumPy."""
    rng, keys = np.random.default_rng(7), np.asarray(layer.keys, float)
    heads, dim = keys.shape
    x = rng.standard_normal((samples, 4, dim))
    x[:, 0, 0] += np.sqrt(3.0)
    x[:, 0, 1] += np.sqrt(3.0) * 1.5 * rng.choice([-1, 1], samples)
    chi = x @ keys.T / np.sqrt(dim)
    found = []
    for subset in subsets:
        kept = np.isin(np.arange(heads), subset)
        if isinstance(activation, th.BayesSoftmax):
            e = np.exp(chi - BIAS) * kept
            attention = e.sum(2) / e.sum((1, 2))[:, None]
        else:
            sink = isinstance(activation, th.Softmax1)
            e = np.exp(chi) if sink else np.exp(chi / TEMPERATURE)
            sigma = SCALE * e / (np.exp(BIAS) + e.sum(1, keepdims=True)) if sink else e / e.sum(1, keepdims=True)
            attention = (sigma * kept).sum(2) / (heads if share == "kept" else kept.sum())
        loss = ((x[:, 0] - np.einsum("nl,nld->nd", attention, x)) ** 2).sum(1) / dim
        found.append((loss.mean(), loss.std() / np.sqrt(samples)))
    return found


# 3 · 2 · 4 comparisons at |z| < 4.5: false-alarm rate 24 · 6.8e-6 = 0.02 %, seeds fixed
@pytest.mark.parametrize("share", ["kept", "renormalized"])
def test_loss_equals_numpy(case, share):
    make, method, _ = case
    activation, samples = make(ALL), 20_000
    layer = trained_layer(activation)
    pruning = prune_heads(TASK, layer, share=share, samples=samples, key=jax.random.key(2), method=method)
    expected = losses_written_out(activation, layer, kept_at(pruning), share, samples)
    for loss, error, (mean, own) in zip(pruning.loss, pruning.loss_error, expected, strict=False):
        assert float(error) == pytest.approx(own, rel=0.1)
        assert abs(float(loss) - mean) < 4.5 * np.hypot(float(error), own)
    # without heads the loss is E‖X_ε‖²/D
    assert abs(float(pruning.loss[3]) - (1 + 3 * (1 + 1.5**2) / 40)) < 4.5 * float(pruning.loss_error[3])


def test_subsets_share_their_samples():
    layer = trained_layer(th.Softmax1(BIAS, SCALE))
    options = {"samples": 500, "key": jax.random.key(2), "method": HEADS}
    greedy = prune_heads(TASK, layer, **options)
    orders = prune_heads(TASK, layer, strategy="random", orders=6, **options)
    np.testing.assert_array_equal(orders.loss[:, 0], np.full(6, greedy.loss[0]))
    np.testing.assert_array_equal(orders.loss[:, 3], np.full(6, greedy.loss[3]))
    of_pair = {frozenset(each.tolist()[1:]): float(loss[1])
               for each, loss in zip(orders.removed, orders.loss, strict=True)}  # fmt: skip
    assert float(greedy.loss[1]) == of_pair[frozenset(greedy.removed.tolist()[1:])]
    other = prune_heads(TASK, layer, **options | {"key": jax.random.key(3)})
    assert np.all(np.asarray(other.loss) != np.asarray(greedy.loss))


@pytest.mark.parametrize("name", CASES)
def test_attention_of_all_heads_is_the_layers(name):
    activation = CASES[name][0](ALL)
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 4)))
    for share in ("kept", "renormalized"):
        attention = attention_of(activation, scores, jnp.ones(3, bool), share)
        np.testing.assert_allclose(attention, activation(scores).mean(1), rtol=1e-14)
        assert not attention_of(activation, scores, jnp.zeros(3, bool), share).any()


# --- report and errors -----------------------------------------------------------------------------------------------


def by_hand(risk):
    risk = jnp.asarray(risk)
    removed = jnp.broadcast_to(jnp.arange(risk.shape[-1] - 1), (*risk.shape[:-1], risk.shape[-1] - 1))
    left = jnp.arange(risk.shape[-1])[::-1]
    return Pruning(left, removed, risk, None, None, "kept", "greedy", None, th.Softmax(), TASK)


def test_redundant_counts_to_the_first_rise():
    pruning = by_hand([0.1, 0.105, 0.12, 0.1, 1.0])
    assert [pruning.redundant(), pruning.redundant(0.001), pruning.redundant(0.05), pruning.redundant(2.0)] == [
        1, 0, 3, 4,
    ]  # fmt: skip
    assert pruning.redundant(lasting=False) == 3
    orders = by_hand([[0.1, 0.1, 0.2], [0.1, 0.2, 0.1]])
    assert [orders.redundant().tolist(), orders.redundant(lasting=False).tolist()] == [[1, 0], [1, 2]]


@pytest.mark.parametrize("strategy", ["greedy", "random"])
def test_report(strategy):
    layer = trained_layer(th.Softmax1(BIAS, SCALE))
    options = {"key": jax.random.key(0), "method": HEADS}
    pruning = prune_heads(TASK, layer, strategy=strategy, samples=500, **options)
    table, data = str(pruning).splitlines(), pruning.to_xarray()
    assert len(table) == 2 + 4
    assert f"{np.asarray(pruning.risk)[..., 0].mean():.6f}" in table[2]
    lead = {"order": 20} if strategy == "random" else {}
    assert dict(data.sizes) == {**lead, "heads_left": 4, "removal": 3}
    np.testing.assert_array_equal(data["risk"].sel(heads_left=2), np.asarray(pruning.risk)[..., 1])
    np.testing.assert_array_equal(data["loss"].sel(heads_left=0), np.asarray(pruning.loss)[..., 3])
    assert data.attrs["strategy"] == strategy
    assert data.attrs["samples"] == 500
    assert "loss" not in prune_heads(TASK, layer, method=HEADS).to_xarray()


LAYER = trained_layer(th.Softmax())


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (LAYER, {"strategy": "best"}, "strategy: expected 'greedy' or 'worst' or 'random'"),
        (LAYER, {"share": "split"}, "share: expected 'kept' or 'renormalized'"),
        (LAYER, {"strategy": "random"}, "key: expected a typed key"),
        (LAYER, {"samples": 100}, "key: expected a typed key"),
        (LAYER, {"samples": 1, "key": jax.random.key(0)}, "samples: expected a whole number >= 2"),
        (LAYER, {"orders": 3}, "orders: expected None"),
        (LAYER, {"activation": th.Softmax()}, "activation: expected None with a layer"),
        (LAYER, {"method": th.MonteCarlo()}, "method: expected Quadrature"),
        (ORDER, {}, "activation: expected an Activation"),
        (ORDER, {"activation": th.Softmax(), "samples": 100, "key": jax.random.key(0)}, "samples: expected None"),
    ],
)
def test_wrong_arguments_are_refused(layer, options, message):
    with pytest.raises(ValueError, match=message):
        prune_heads(TASK, layer, **options)


def test_replicas_are_refused():
    layer = MultiHeadAttention(np.zeros((2, 3, 40), np.float32), features=2)
    with pytest.raises(ValueError, match="layer: expected a single layer"):
        prune_heads(TASK, layer)


# --- pruning at the optimum ------------------------------------------------------------------------------------------


def pruned_optimum(task, activation, share):
    """The best six heads found, and their pruning."""
    best = th.optimal_risk(task, activation, heads=6, starts=2, progress=False, method=th.Quadrature(1e-4))
    options = {"activation": best.activation, "method": th.Quadrature(1e-5)}
    return best, prune_heads(task, best.order, share=share, **options)


ONE_HOT = th.SingleLocation(5, 12.0, th.one_hot(3))
FLIPS = th.SingleLocation(5, 12.0, th.sign_flips([0.0, 0.0], [1.0, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "points"), [(ONE_HOT, 3), (FLIPS, 4)], ids=["one-hot", "flips"])
def test_bayes_softmax_needs_one_head_per_support_point(task, points):
    best, pruning = pruned_optimum(task, th.BayesSoftmax(np.zeros(6), trained=True), "kept")
    assert pruning.redundant() == 6 - points
    # heads of one support point share its weight in any proportion, and the biases of those left are off by what one
    # of them had: with the biases that their norms imply they are the posterior
    left = np.asarray(pruning.removed)[6 - points :]
    order = th.OrderParameters(best.order.m[left], best.order.r[np.ix_(left, left)])
    risk = th.population_risk(task, th.BayesSoftmax("norm"), order, th.Quadrature(1e-5))
    assert float(risk) == pytest.approx(float(th.bayes_risk(task)), abs=1e-4)
    assert float(pruning.risk[6 - points + 1]) > float(pruning.risk[0]) + 0.3  # and then it collapses


@pytest.mark.slow
@pytest.mark.parametrize(("task", "points"), [(ONE_HOT, 3), (FLIPS, 4)], ids=["one-hot", "flips"])
def test_softmax1_has_an_optimum_with_silent_heads(task, points):
    # c ≈ H: one head for every support point, the others silent; searches from few starts may end in others
    aligned = 3.5 * np.asarray(task.prior.means)
    m = np.concatenate([aligned, 0.1 * np.random.default_rng(0).standard_normal((6 - points, task.features))])
    first = (th.OrderParameters(m, m @ m.T), th.Softmax1(bias=10.0, scale=6.0, trained=True))
    coarse, fine = th.Quadrature(1e-4), th.Quadrature(1e-5)
    best = th.optimal_risk(task, first[1], 6, starts=1, first=first, method=coarse, progress=False)
    assert float(best.activation.scale) == pytest.approx(6, abs=0.2)
    kept, renormalized = (
        prune_heads(task, best.order, share=share, activation=best.activation, method=fine) for share in SHARES
    )
    assert kept.redundant() == 6 - points
    assert float(kept.risk[6 - points + 1]) > float(kept.risk[0]) + 0.2
    assert renormalized.redundant() == 0  # the scale c was right for 1/H


@pytest.mark.slow
@pytest.mark.parametrize("task", [ONE_HOT, FLIPS], ids=["one-hot", "flips"])
def test_softmax_degrades_slowly(task):
    # where the other two have lost 0.3 and more, two heads left of six, it has lost little
    _, pruning = pruned_optimum(task, th.Softmax(), "renormalized")
    assert float(pruning.risk[4]) < float(pruning.risk[0]) + 0.1
    assert np.all(np.diff(np.asarray(pruning.risk)[:5]) < 0.06)
