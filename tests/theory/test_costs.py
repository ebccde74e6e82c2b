"""What silent heads cost: NumPy sampling, differences of population risks, the rule of alignment, the report."""

import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.states import PRIORS, random_state

TASK = th.SingleLocation(4, 2.0, PRIORS["mixture"])
ORDER = random_state(5, heads=3, m=0.8, w=0.3)
BIAS, SCALE = np.array([-1.0, 0.5, 1.5]), np.array([3.0, 2.0, 4.0])
# counts beyond what any state here needs, so that all of one shape share compiled code
HEADS, JOINT = th.Quadrature(1e-7, nodes=96, frequencies=128), th.Quadrature(1e-6, nodes=64, points=(20, 32, 64))
CASES = {
    "softmax": (th.Softmax([1.0, 0.7, 1.4]), HEADS),
    "softmax-1": (th.Softmax1(BIAS, SCALE), HEADS),
    "B-softmax": (th.BayesSoftmax(BIAS), JOINT),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    activation, method = CASES[request.param]
    return activation, method, th.head_costs(TASK, activation, ORDER, method)


def heads_removed(order, kept):
    kept = np.flatnonzero(kept)
    return th.OrderParameters(order.m[kept], order.r[np.ix_(kept, kept)])


def written_out(activation, chi, kept):
    """a (n, L) and σ (n, L, H) of scores (n, L, H), with the heads kept only."""
    heads = chi.shape[-1]
    if isinstance(activation, th.BayesSoftmax):
        e = np.exp(chi - BIAS) * kept
        sigma = heads * e / e.sum((1, 2), keepdims=True)
        return sigma.mean(-1), sigma
    if isinstance(activation, th.Softmax):
        e = np.exp(chi / np.asarray(activation.temperature))
        sigma = e / e.sum(1, keepdims=True)
    else:
        e = np.exp(chi)
        sigma = SCALE * e / (np.exp(BIAS) + e.sum(1, keepdims=True))
    return (sigma * kept).sum(-1) / heads, sigma


# 3 · 2 · 8 comparisons at |z| < 4.5: false-alarm rate 48 · 6.8e-6 = 0.03 %, seeds fixed
def test_every_number_equals_sampling(case):
    activation, _, costs = case
    rng, samples = np.random.default_rng(0), 100_000
    m, r, prior = np.asarray(ORDER.m), np.asarray(ORDER.r), TASK.prior
    for c in range(2):
        values, vectors = np.linalg.eigh(np.asarray(prior.covariances[c]))
        theta = np.asarray(prior.means[c]) + rng.standard_normal((samples, 3)) * np.sqrt(values.clip(0)) @ vectors.T
        chi = rng.standard_normal((samples, 4, 3)) @ np.linalg.cholesky(r).T
        chi[:, 0] += np.sqrt(2.0) * theta @ m.T

        def loss(kept, chi=chi):
            attention = written_out(activation, chi, kept)[0]
            return ((attention - np.eye(4)[0]) ** 2).sum(1)

        own, everything = np.asarray(costs.aligned[c]), np.ones(3, bool)
        full = loss(everything)
        pairs = [(costs.component_risk[c], full), (costs.component_miss[c], loss(own))]
        pairs += [(costs.component_cost[c, h], full - loss(np.arange(3) != h)) for h in range(3)]
        hit = written_out(activation, chi, everything)[1][:, 0]
        pairs += [(costs.hit[c, h], hit[:, h]) for h in range(3)]
        for exact, sampled in pairs:
            assert abs(float(exact) - sampled.mean()) < 4.5 * sampled.std() / np.sqrt(samples)


def test_parts_add_up_to_the_population_risk(case):
    activation, method, costs = case
    risk = float(th.population_risk(TASK, activation, ORDER, method))
    assert float(costs.weights @ (costs.component_miss + costs.component_injected)) == pytest.approx(risk, abs=1e-6)
    assert float(costs.miss + costs.injected) == pytest.approx(risk, abs=1e-6)
    assert float(costs.risk) == pytest.approx(risk, abs=1e-6)
    np.testing.assert_allclose(costs.weights @ costs.component_cost, costs.cost, atol=1e-14)


def test_cost_is_a_difference_of_two_population_risks(case):
    activation, method, costs = case
    for h in range(3):
        kept = np.arange(3) != h
        if isinstance(activation, th.BayesSoftmax):
            two = th.Quadrature(1e-6, nodes=64, points=(32, 64))
            without = th.population_risk(TASK, th.BayesSoftmax(BIAS[kept]), heads_removed(ORDER, kept), two)
        elif isinstance(activation, th.Softmax1):
            without = th.population_risk(TASK, th.Softmax1(BIAS, SCALE * kept), ORDER, method)
        else:  # softmax-1 without its sink, on scores divided by the temperature
            inverse = 1 / np.asarray(activation.temperature)
            cooled = th.OrderParameters(inverse[:, None] * ORDER.m, np.outer(inverse, inverse) * ORDER.r)
            without = th.population_risk(TASK, th.Softmax1(-40.0, 1.0 * kept), cooled, th.Quadrature(1e-7))
        assert float(costs.cost[h]) == pytest.approx(float(costs.risk - without), abs=3e-6)


def test_hits_add_up_to_the_attention_on_the_informative_token():
    # the posterior's risk is 1 − E p_ε
    task = th.SingleLocation(4, 3.0, th.one_hot(3, [0.5, 0.3, 0.2]))
    order, activation = th.bayes_heads(task)
    costs = th.head_costs(task, activation, order, JOINT)
    assert float(costs.weights @ costs.hit.mean(1)) == pytest.approx(1 - float(th.bayes_risk(task)), abs=3e-6)


def test_bias_that_follows_the_norms():
    by_norm = th.head_costs(TASK, th.BayesSoftmax("norm"), ORDER, JOINT)
    resolved = th.head_costs(TASK, th.BayesSoftmax(jnp.diagonal(ORDER.r) / 2), ORDER, JOINT)
    np.testing.assert_allclose(by_norm.component_cost, resolved.component_cost, atol=1e-12)
    np.testing.assert_allclose(by_norm.hit, resolved.hit, atol=1e-12)


# --- which heads are aligned -----------------------------------------------------------------------------------------


def test_rule_of_alignment():
    task = th.SingleLocation(4, 2.0, th.discrete([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    m = np.array([[2.0, 0.1], [1.01, 0.0], [0.99, -1.0]])
    costs = th.head_costs(task, th.Softmax(), th.OrderParameters(m, m @ m.T), HEADS)
    assert costs.aligned.tolist() == [[True, True, False], [True, False, False], [False, False, False]]
    assert float(costs.component_miss[2]) == 1  # nobody is left
    # all heads are right for a component without a mean
    task = th.SingleLocation(4, 2.0, th.gaussian([0.0, 0.0], [1.0, 2.0]))
    costs = th.head_costs(task, th.Softmax(), th.OrderParameters(m, m @ m.T), HEADS)
    assert costs.aligned.all()
    assert float(costs.injected) == 0


def test_alignment_may_be_given():
    aligned = np.array([[True, False, True], [True, True, True]])
    activation, method = CASES["softmax-1"]
    costs = th.head_costs(TASK, activation, ORDER, method, aligned=aligned)
    assert costs.aligned.tolist() == aligned.tolist()
    assert float(costs.component_injected[1]) == 0
    assert float(costs.component_injected[0]) == pytest.approx(float(costs.component_cost[0, 1]), abs=1e-14)


@pytest.mark.parametrize("aligned", [np.ones((2, 3)), np.ones((3, 2), bool), np.ones(3, bool)])
def test_alignment_that_is_no_mask_is_refused(aligned):
    with pytest.raises(ValueError, match="aligned: expected booleans"):
        th.head_costs(TASK, *[CASES["softmax"][0], ORDER, HEADS], aligned=aligned)


def test_what_cannot_be_evaluated_is_refused():
    with pytest.raises(ValueError, match="method: expected Quadrature"):
        th.head_costs(TASK, th.Softmax(), ORDER, th.MonteCarlo())
    with pytest.raises(ValueError, match="order: expected one state"):
        th.head_costs(TASK, th.Softmax(), th.OrderParameters(ORDER.m[None], ORDER.r[None]))


def test_report(case):
    _, _, costs = case
    table, data = str(costs).splitlines(), costs.to_xarray()
    assert f"{float(costs.risk):.6f}" in table[0]
    assert len(table) == 2 + 2 + 1 + 1
    assert sum(line.count("*") for line in table[:-1]) == int(costs.aligned.sum())
    np.testing.assert_array_equal(data["component_cost"].sel(component=1, head=2), costs.component_cost[1, 2])
    assert data.attrs["activation"] == costs.activation.name
