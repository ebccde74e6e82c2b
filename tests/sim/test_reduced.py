"""The reduced chain: its law is that of SGD in D dimensions, and a run is the same however it is cut.

Samples of the two are compared at fixed keys: a right chain fails such a test with the probability that it states.
"""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import riskless
from scipy import stats

from sim import MultiHeadAttention, draw_tokens, train, train_reduced
from sim._chain import (
    Sampler,
    Setting,
    State,
    _chi,
    _for_samples,
    _fresh_losses,
    _lower,
    _normals,
    advance,
    factor,
    least_dim,
    measure,
)
from sim._lanes import Lane, repeated
from sim._sgd import loss_gradient, trained_leaves
from theory import (
    BayesSoftmax,
    OrderParameters,
    Result,
    RunFailed,
    SingleLocation,
    Softmax,
    Softmax1,
    gaussian,
    one_hot,
    sign_flips,
)

TASK = SingleLocation(4, 3.0, sign_flips([1.0, 0.0], [0.0, 1.5]))
KEY = jax.random.key(5)
RATES = {"bias": 0.7, "scale": 1.9}
ACTIVATIONS = {
    "softmax": Softmax([1.0, 0.8]),
    "softmax-1": Softmax1([-0.2, 0.4], [1.7, 2.2], trained=True),
    "joint": BayesSoftmax([0.3, -0.2], trained=True),
    "norm": BayesSoftmax("norm", weights=[0.7, 0.3]),
}
OPTIONS = {
    "dim": 20, "learning_rate": 2.0, "time": 1.5, "batch": 3, "key": KEY, "record": 3, "evaluation": 20,
    "bias_rate": RATES["bias"], "scale_rate": RATES["scale"], "progress": False,
}  # fmt: skip
JOINT = BayesSoftmax([0.1, 0.1], trained=True)  # of most tests, which share its compiled code
M = np.array([[0.5, 0.3], [0.6, -0.4]])
W = np.array([[0.7, 0.0], [0.2, 0.6]])


def _order(replicas=None, dim=20):
    return OrderParameters.initial(jax.random.key(1), heads=2, features=2, dim=dim, variance=0.5, replicas=replicas)


@pytest.fixture
def without_risk():
    with riskless.without_risk():
        yield


# --- one step


def _setting(activation, keys, *, dim, batch, loss, step, task=TASK):
    rates = {"order": jnp.asarray(step, jnp.float64)} | {
        name: jnp.asarray(rate * step, jnp.float64) for name, rate in RATES.items()
    }
    lanes = Lane(keys, *repeated((task, activation.split()[1]), keys.size))
    return Setting(lanes, jnp.asarray(dim, jnp.float64), rates, batch, loss)


def _state(activation, replicas):
    repeat = lambda leaf: jnp.array(jnp.broadcast_to(leaf, (replicas, *jnp.shape(leaf))))  # noqa: E731
    return State(repeat(np.concatenate([M, W], axis=1)), jax.tree.map(repeat, activation.split()[0]))


def _columns(m, r, trained):
    """(N, numbers of a state)."""
    count, below = len(m), np.tril_indices(2)
    own = [np.asarray(leaf).reshape(count, -1) for leaf in jax.tree.leaves(trained)]
    return np.concatenate([np.asarray(m).reshape(count, -1), np.asarray(r)[:, below[0], below[1]], *own], axis=1)


def _steps_of_the_chain(activation, dim, batch, loss, eta, count, task):
    keys = jax.random.split(jax.random.key(11), count)
    setting = _setting(activation, keys, dim=dim, batch=batch, loss=loss, step=eta / dim, task=task)
    state, _ = advance((setting, jnp.asarray(0), jnp.asarray(1)), _state(activation, count))
    heads = np.asarray(state.heads)
    return _columns(heads[..., :2], heads @ np.swapaxes(heads, 1, 2), state.trained)


def _steps_in_full(activation, dim, batch, loss, eta, count, task):
    """From the same heads in D dimensions."""
    keys = np.zeros((2, dim))
    keys[:, :2], keys[:, 2:4] = M, W
    layer = MultiHeadAttention(np.sqrt(dim) * keys, features=2, activation=activation)
    params, rest = eqx.partition(layer, trained_leaves(layer, {"keys": 1, "bias": 1, "scale": 1}))

    @jax.jit
    @jax.vmap
    def step(key):
        tokens = draw_tokens(task, key, batch, dim=dim, dtype=jnp.float64)
        gradient = loss_gradient(params, rest, tokens, loss)
        k = layer.keys - eta / batch * gradient.keys
        move = lambda path, b, slope: b - RATES[path[0].name] * eta / dim / batch * slope  # noqa: E731
        return (
            k[:, :2] / np.sqrt(dim),
            k @ k.T / dim,
            jax.tree.map_with_path(move, params.activation, gradient.activation),
        )

    return _columns(*step(jax.random.split(jax.random.key(12), count)))


def _least_p_of_moments(one, other):
    """Bonferroni's p for equal means, variances and covariances of all columns."""
    centre, scale = other.mean(axis=0), other.std(axis=0)
    one, other = (one - centre) / scale, (other - centre) / scale
    i, j = np.tril_indices(one.shape[1])
    one, other = (np.concatenate([x, x[:, i] * x[:, j]], axis=1) for x in (one, other))
    z = (one.mean(axis=0) - other.mean(axis=0)) / np.sqrt(one.var(axis=0) / len(one) + other.var(axis=0) / len(other))
    return 2 * stats.norm.sf(np.max(np.abs(z))) * z.size


def _least_p_of_laws(one, other):
    """Bonferroni's p of Kolmogorov–Smirnov tests of all columns."""
    return min(stats.ks_2samp(a, b).pvalue for a, b in zip(one.T, other.T, strict=True)) * one.shape[1]


def _check_a_step(name, loss, batch, *, count, alpha, task=TASK):
    """At the smallest D of the chain, where nothing is nearly Gaussian; false alarm 2α."""
    case = (ACTIVATIONS[name], least_dim(2, 2, batch, loss), batch, loss, 6.0, count, task)
    ours, full = _steps_of_the_chain(*case), _steps_in_full(*case)
    assert _least_p_of_moments(ours, full) > alpha
    assert _least_p_of_laws(ours, full) > alpha


@pytest.mark.parametrize(
    ("name", "loss", "batch"), [("softmax", "finite", 1), ("softmax-1", "finite", 3), ("norm", "limit", 3)]
)
def test_a_step_has_the_law_of_one_in_full_dimensions(name, loss, batch):
    _check_a_step(name, loss, batch, count=20_000, alpha=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("loss", ["finite", "limit"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_step_has_the_law_of_one_in_full_dimensions_to_many_digits(name, loss, batch):
    """300,000 steps each; false alarm 1 % over all 24 cases."""
    _check_a_step(name, loss, batch, count=300_000, alpha=0.01 / 48)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [gaussian([0.5, 0.0], [[1.0, 0.6], [0.6, 0.9]]), one_hot(2, [0.3, 0.7])], ids=str)
def test_other_priors(prior):
    _check_a_step("softmax", "finite", 2, count=100_000, alpha=1e-3, task=SingleLocation(3, 4.0, prior))


@pytest.mark.parametrize("loss", ["finite", "limit"])
def test_fresh_losses_have_their_law_in_full_dimensions(loss):
    """At D = 5, the smallest; false alarm 1e-3."""
    activation, dim, count = ACTIVATIONS["softmax"], 5, 20_000
    setting = _setting(activation, KEY[None], dim=dim, batch=1, loss=loss, step=0.1)
    state = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), _state(activation, 1))
    sampler, rest = Sampler.of(setting.lanes.task), _for_samples(setting.lanes.rest, count)
    ours = eqx.filter_jit(_fresh_losses)(setting, sampler, rest, state, KEY[None], count)[:, 0]
    keys = np.zeros((2, dim))
    keys[:, :2], keys[:, 2:4] = M, W
    layer = MultiHeadAttention(np.sqrt(dim) * keys, features=2, activation=activation)
    losses = importlib.import_module("sim.loss").sample_losses
    full = losses(layer, draw_tokens(TASK, jax.random.key(3), count, dim=dim, dtype=jnp.float64), loss)
    assert stats.ks_2samp(np.asarray(ours), np.asarray(full)).pvalue > 1e-3


def test_chi_variables():
    """Over nine decades of freedom, from one on; false alarm 1e-3."""
    freedom, count = np.array([1.0, 2, 3, 7, 40, 1000, 1e5, 1e9, 0, -3]), 40_000
    key, other = jax.random.split(KEY)
    normals = _normals(key[None], (len(freedom), count))
    draws = np.asarray(jax.jit(_chi)(normals, other[None], jnp.asarray(freedom)))[:, :, 0].astype(np.float64)
    assert np.all(draws[-2:] == 0)
    for nu, sample in zip(freedom[:-2], draws, strict=False):
        law = stats.chi(nu) if nu < 1e4 else stats.norm(np.sqrt(nu - 0.5), np.sqrt(0.5))
        assert stats.kstest(sample, law.cdf).pvalue > 1e-3 / 8, nu


def test_triangular_factors_of_any_rank():
    rows = np.random.default_rng(0).normal(size=(4, 6, 5))
    rows[1] = rows[0]  # identical
    rows[2, :, 1:] = 0
    rows[:, :, 3] = 0
    rows[3, :, 4] *= 1e-9
    lower = np.asarray(_lower(jnp.asarray(rows)))
    np.testing.assert_allclose(
        np.einsum("hkr,gkr->hgr", lower, lower), np.einsum("hkr,gkr->hgr", rows, rows), rtol=1e-12, atol=1e-13
    )
    assert np.all(lower[np.triu_indices(4, 1)] == 0)
    np.testing.assert_allclose(lower[1, 1:], 0, atol=1e-14)


# --- whole runs


def _two_runs(name, loss, *, dim, batch, time, replicas, record, learning_rate=4.0):
    """Records of both simulators from one start, (R, T, numbers of a state) each."""
    activation = ACTIVATIONS[name]
    keys = np.zeros((2, dim))
    keys[:, :2], keys[:, 2:4] = 0.4 * M, W
    keys = jnp.asarray(np.broadcast_to(np.sqrt(dim) * keys, (replicas, 2, dim)), jnp.float32)
    layer = MultiHeadAttention(keys, features=2, activation=activation)
    options = OPTIONS | {"learning_rate": learning_rate, "time": time, "batch": batch, "record": record, "loss": loss}
    del options["dim"]
    runs = train(TASK, layer, **options), train_reduced(TASK, activation, layer.order(), dim=dim, **options)
    assert dict(runs[0].settings) | {"source": 0, "dtype": 0} == dict(runs[1].settings) | {"source": 0, "dtype": 0}
    np.testing.assert_array_equal(runs[0].time, runs[1].time)
    np.testing.assert_allclose(runs[0].order.m[:, 0], runs[1].order.m[:, 0], atol=1e-12)
    columns = []
    for run in runs:
        below = np.tril_indices(2)
        numbers = [run.order.m.reshape(replicas, -1, 4), np.asarray(run.order.r)[:, :, below[0], below[1]]]
        numbers += [getattr(run.activation, leaf) for leaf in run.activation.trained]
        numbers += [np.asarray(run.risk)[..., None], np.asarray(run.loss)[..., None]]
        columns.append(np.concatenate(numbers, axis=-1)[:, 1:])
    return columns


def _holm(values):
    """Least p after Holm's correction: the first step decides whether anything is rejected."""
    return np.min(values) * np.size(values)


@pytest.mark.slow
def test_a_run_has_the_law_of_one_in_full_dimensions(without_risk):
    """At D = 40, 10 and 20 steps, 300 replicas; false alarm 1e-3."""
    full, reduced = _two_runs("softmax", "finite", dim=40, batch=2, time=2.0, replicas=300, record=3)
    tested = [i for i in range(full.shape[-1]) if i != 7]  # the risk is blank
    assert _holm([stats.ks_2samp(full[:, t, i], reduced[:, t, i]).pvalue for t in range(2) for i in tested]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dim", [200, 1000])
@pytest.mark.parametrize("loss", ["finite", "limit"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_runs_have_the_law_of_those_in_full_dimensions(name, loss, dim):
    """m, r, trained numbers, risk and loss at four times, 240 replicas; false alarm 1 % over all 16 cases."""
    full, reduced = _two_runs(name, loss, dim=dim, batch=2, time=4.0, replicas=240, record=[0.0, 0.5, 1.0, 2.0, 4.0])
    p = [stats.ks_2samp(a, b).pvalue for a, b in zip(full.reshape(240, -1).T, reduced.reshape(240, -1).T, strict=True)]
    assert _holm(p) > 0.01 / 16, p


def _assert_same(a, b):
    ours, theirs = ((run.time, run.order, run.activation, run.loss, run.loss_error) for run in (a, b))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_blocks_and_company(without_risk):
    """Bit for bit: blocks of any length, and a replica alone."""
    run = train_reduced(TASK, JOINT, _order(3), **OPTIONS)
    assert run.order.r.shape == (3, 3, 2, 2)
    assert run.activation.bias.shape == (3, 3, 2)
    assert len(np.unique(run.order.m[:, -1], axis=0)) == 3
    for block in (1, 4):
        _assert_same(train_reduced(TASK, JOINT, _order(3), block=block, **OPTIONS), run)
    for i in (0, 2):
        alone = train_reduced(TASK, JOINT, _order(3)[i], **OPTIONS | {"key": jax.random.fold_in(KEY, i)})
        assert alone.replicas is None
        _assert_same(alone, run[i])


def test_fields_and_what_a_record_is(without_risk):
    order = _order()
    run = train_reduced(TASK, JOINT, order, **OPTIONS)
    np.testing.assert_allclose(run.order.m[0], order.m, rtol=1e-15)
    np.testing.assert_allclose(run.order.r[0], order.r, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(run.time, np.array([0, 8, 15]) * 2.0 / 20)
    assert dict(run.settings) == {
        "source": "reduced", "activation": JOINT.name, "heads": 2, "features": 2, "dim": 20,
        "dtype": "float64", "learning_rate": 2.0, "batch": 3, "time": 1.5, "loss": "finite", "bias_rate": 0.7,
        "scale_rate": 1.9, "evaluation": 20, "replicas": None, "key": (0, 5), "key_impl": "threefry2x32",
    }  # fmt: skip
    short = train_reduced(TASK, JOINT, order, **OPTIONS | {"time": 0.8, "record": [0.8]})
    np.testing.assert_array_equal(short.order.r[0], run.order.r[1])
    assert short.loss[0] == run.loss[1]


def test_degenerate_starts(without_risk):
    """Identical heads, heads within the spikes' span, and zero heads; r − m mᵀ keeps its sign.

    Rounding in float32 may start a split, which then grows by itself: here to 1e-6 in 100 steps.
    """
    same = np.array([[0.5, 0.3], [0.5, 0.3]])
    m = np.stack([same, M, np.zeros((2, 2))])
    r = m @ np.swapaxes(m, 1, 2) + np.array([0.4, 0.0, 0.0])[:, None, None]
    run = train_reduced(TASK, JOINT, OrderParameters(m, r), **OPTIONS | {"time": 20.0})
    r_perp = np.asarray(run.order.r_perp)
    scale = np.trace(np.asarray(run.order.r), axis1=-2, axis2=-1)[..., None]
    assert np.all(np.linalg.eigvalsh(r_perp) >= -1e-14 * np.maximum(scale, 1e-300))
    for i in (0, 2):
        r = np.asarray(run.order.r)[i]
        assert np.all(r[1:, 0, 0] > 0.01)
        np.testing.assert_allclose(run.order.m[i, :, 0], run.order.m[i, :, 1], atol=1e-4)
        np.testing.assert_allclose(r[:, 0, 0] - r[:, 0, 1], 0, atol=1e-4)
    assert np.all(np.linalg.eigvalsh(r_perp[1, 1:]) > 1e-3)


def test_steps_beyond_32_bits():
    """The clock is exact, and every step has draws of its own."""
    setting = _setting(JOINT, KEY[None], dim=20, batch=3, loss="finite", step=0.1)
    ends = []
    for start in (5, 5 + 2**31, 5 + 2**32, 5 + 2**40):
        state, sound = advance((setting, jnp.asarray(start), jnp.asarray(2)), _state(JOINT, 1))
        assert bool(sound)
        ends.append(np.asarray(state.heads).ravel())
    assert len(np.unique(ends, axis=0)) == 4


def test_the_clock_of_very_long_runs(monkeypatch, without_risk):
    """10^14 steps at D = 10^12, of which none is made."""
    starts = []

    def skip(block, state):
        starts.append((block[1], block[2]))
        return state, jnp.ones(1, bool)

    module = importlib.import_module("sim.reduced")
    monkeypatch.setattr(module, "advance", skip)
    options = OPTIONS | {"dim": 10**12, "learning_rate": 0.5, "time": 50.0, "record": [12.5, 50.0]}
    run = train_reduced(TASK, JOINT, _order(), block=4 * 10**13, **options)
    assert run.time.tolist() == [12.5, 50.0]
    assert [(int(a), int(b)) for a, b in starts] == [
        (0, 25 * 10**12),
        (25 * 10**12, 4 * 10**13),
        (65 * 10**12, 35 * 10**12),
    ]
    assert all(a.dtype == b.dtype == jnp.int64 for a, b in starts)


def test_numbers_never_recompile(monkeypatch, without_risk):
    module = importlib.import_module("sim.reduced")
    once = eqx.debug.assert_max_traces(advance.__wrapped__, max_traces=1)
    monkeypatch.setattr(module, "advance", eqx.filter_jit(once, donate="all-except-first"))
    monkeypatch.setattr(
        module, "measure", eqx.filter_jit(eqx.debug.assert_max_traces(measure.__wrapped__, max_traces=1))
    )
    for change in range(2):
        task = SingleLocation(4, 1.0 + change, sign_flips([1.0 + change, 0.0], [0.0, 1.5 + change]))
        options = {"dim": 20 + change, "learning_rate": 1.0 + change, "block": 1 + 3 * change, "record": [0.5 + change]}
        options |= {"key": jax.random.key(change), "bias_rate": 1.0 + change, "scale_rate": 1.0 + change}
        train_reduced(task, Softmax1(0.1 + change, 1.0 + change, trained=True), _order(), **OPTIONS | options)
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        train_reduced(TASK, Softmax1(trained=True), _order(), **OPTIONS | {"batch": 4})


def test_divergence_leaves_the_others(without_risk):
    order = _order(3)
    bad = OrderParameters(order.m.at[1].mul(1e22), order.r.at[1].mul(1e44))
    with pytest.raises(RunFailed, match="SGD: replica 1 diverged"):
        train_reduced(TASK, JOINT, bad, **OPTIONS)
    mixed = train_reduced(TASK, JOINT, bad, throw=False, **OPTIONS)
    assert mixed.result.tolist() == [Result.successful, Result.diverged, Result.successful]
    assert np.isnan(mixed.order.m[1, 1:]).all()
    fine = train_reduced(TASK, JOINT, order, **OPTIONS)
    for i in (0, 2):
        _assert_same(mixed[i], fine[i])


@pytest.mark.parametrize(
    ("heads", "features", "batch", "loss", "least"),
    [(2, 2, 1, "finite", 5), (2, 2, 3, "finite", 7), (2, 2, 3, "limit", 4), (4, 3, 10, "finite", 12)],
)
def test_refuses_a_dimension_without_room(heads, features, batch, loss, least):
    task = SingleLocation(4, 1.0, sign_flips([1.0] * features, [0.0] * features))
    order = OrderParameters(np.zeros((heads, features)), np.eye(heads))
    options = OPTIONS | {"dim": least - 1, "batch": batch, "loss": loss}
    with pytest.raises(ValueError, match=rf"dim: expected at least {least} for H = {heads}, F = {features}, .* got"):
        train_reduced(task, Softmax(), order, **options)
    assert least_dim(heads, features, batch, loss) == least


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim: expected a whole number >= 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected positive numbers"),
        ({"time": 0.01}, "time: expected at least one step, η/D = 0.1, got 0.01"),
        ({"time": 1e9, "learning_rate": 1e-15}, r"time: expected at most 2\^53 steps, each learning_rate/D = 5e-17"),
        ({"time": 1e300, "learning_rate": 1e-300}, r"time: expected at most 2\^53 steps"),
        ({"dim": 10**400}, r"dim: expected at most 1e\+15"),
        ({"batch": 0}, "batch: expected a whole number >= 1, got 0"),
        ({"evaluation": 1}, "evaluation: expected a whole number >= 2, got 1"),
        ({"block": 0}, "block: expected a whole number >= 1, got 0"),
        ({"loss": "infinite"}, "loss: expected 'finite' or 'limit', got 'infinite'"),
        ({"bias_rate": -1.0}, "bias_rate: expected no negative entry"),
        ({"record": [0.0, 3.2]}, "record: expected times up to time = 1.5, got 3.2"),
        ({"key": 0}, "key: expected one typed key"),
        (
            {"order": OrderParameters(np.zeros((2, 1)), np.eye(2))},
            "order.features: expected 2, the features of the task",
        ),
        (
            {"order": OrderParameters(np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2, 2)))},
            r"order.m: expected shape \(H, F\)",
        ),
        (
            {"order": OrderParameters(np.zeros((0, 2, 2)), np.zeros((0, 2, 2)))},
            r"order.m: expected shape .*, none of them 0, got \(0, 2, 2\)",
        ),
        ({"checkpoint": "a\0b"}, "checkpoint: expected a path"),
        ({"activation": Softmax([1.0, 2.0, 3.0])}, "temperature: expected one number or one per head"),
    ],
)
def test_refuses(change, message):
    arguments = {"task": TASK, "activation": Softmax(), "order": _order()} | OPTIONS | change
    with pytest.raises(ValueError, match=message):
        train_reduced(**arguments)


@pytest.mark.slow
def test_a_large_evaluation_is_made_in_pieces(without_risk):
    """The mean of 10,000 fresh losses agrees with that of 4,000; |z| < 5."""
    few, many = (
        train_reduced(TASK, Softmax(), _order(), **OPTIONS | {"evaluation": n, "record": [0.1], "time": 0.1})
        for n in (4_000, 10_000)
    )
    assert abs(few.loss[0] - many.loss[0]) < 5 * np.hypot(few.loss_error[0], many.loss_error[0])
    np.testing.assert_allclose(few.loss_error[0] / many.loss_error[0], np.sqrt(2.5), rtol=0.1)


def test_refuses_unknown_options():
    with pytest.raises(TypeError, match="step_size"):
        train_reduced(TASK, Softmax(), _order(), step_size=1.0, **OPTIONS)


def test_start_keeps_its_overlaps():
    """A square root of r_⊥ for any rank, as exact as r_⊥ itself."""
    small = np.array([[1e-16, 3e-9], [3e-9, 0.1]])  # of rank 2
    lead = [np.ones((2, 2)), np.zeros((2, 2)), 1e-12 * np.eye(2), np.array([[0.5, -0.2], [-0.2, 0.3]]), small]
    w = factor(np.stack(lead))
    np.testing.assert_allclose(w @ np.swapaxes(w, 1, 2), lead, rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(w[0, 0], w[0, 1])
