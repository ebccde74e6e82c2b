"""Sweeps: what single calls give, by code compiled once, each point the same in whatever company."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.states import PRIORS, random_state
from theory import _each, bayes, flow, risk
from theory.many import bayes_risks, gradient_flows, population_risks

FLIP = th.sign_flips([0.0], [1.0])
LINE, HEADS = th.Quadrature(1e-6, nodes=64, points=(48,)), th.Quadrature(1e-7, 32, 40)
ACTIVATIONS = {
    "softmax": (lambda i: th.Softmax(1 + 0.1 * i), HEADS),
    "softmax1": (lambda i: th.Softmax1(0.1 * i, 2.0, trained=True), HEADS),
    "bayes": (lambda i: th.BayesSoftmax([0.1 * i, 0.0]), th.Quadrature(1e-5, 40, points=(16, 20))),
    "norm": (lambda i: th.BayesSoftmax("norm"), th.Quadrature(1e-4, 40, points=1024)),
    "sampled": (lambda i: th.Softmax(1 + 0.1 * i), th.MonteCarlo(2_000)),
}


def sweep(count, lengths=(5,), prior=lambda i: th.sign_flips([0.0], [0.5 + 0.1 * (i % 7)])):
    return [th.SingleLocation(lengths[i % len(lengths)], 0.5 + 0.01 * i, prior(i)) for i in range(count)]


def start(i, features=1):
    return random_state(i, heads=2, features=features, m=0.5, w=0.4)


def traces(counted):
    """How often `counted` is traced: an evaluation in the compiled loop is, once per compilation."""
    seen = []

    def wrapped(*args):
        seen.append(args)
        return counted(*args)

    return wrapped, seen


# --- as single calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        LINE,
        pytest.param(th.Quadrature(1e-4, nodes=64, points=256), marks=pytest.mark.slow),
        pytest.param(th.MonteCarlo(2_000), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bayes_risks_are_those_of_single_calls(method):
    tasks = sweep(6, lengths=(3, 1000, 7))
    risks, errors = bayes_risks(tasks, method=method)
    for i, task in enumerate(tasks):
        risk, error = th.bayes_risk(task, method, with_error=True)
        np.testing.assert_allclose(risks[i], risk, rtol=0, atol=1e-12)
        np.testing.assert_allclose(errors[i], error, rtol=0, atol=1e-12)


def test_bayes_risks_refuse_the_methods_that_a_single_call_refuses():
    task = th.SingleLocation(5, 2.0, th.sign_flips([0.0, 0.0], [1.0, 0.5]))
    for method, message in [
        (th.Quadrature(1e-6, nodes=64, frequencies=40), "method: expected points in place of frequencies"),
        (th.Quadrature(1e-6, nodes=64, points=(48,)), "points: expected one count per feature"),
    ]:
        for call in (lambda m: th.bayes_risk(task, m), lambda m: bayes_risks([task], method=m)):
            with pytest.raises(ValueError, match=message):
                call(method)


def test_each_task_has_its_own_nodes_in_whatever_company():
    """Halves of axes only where w is even: not for unequal masses, a mean, or axes that are oblique."""
    priors = (
        th.sign_flips([0.0, 0.0], [1.0, 0.4]),
        th.sign_flips([0.0, 0.5], [1.0, 0.4]),
        th.discrete([[1.0, 0.4], [-1.0, 0.4], [1.0, -0.4], [-1.0, -0.4]], [0.25, 0.35, 0.15, 0.25]),
        th.discrete([[1.0, 0.4], [-1.0, -0.4], [0.9, 0.4], [-0.9, -0.4]]),
    )
    points = [th.discrete(prior.means, prior.weights) for prior in priors]
    tasks = [th.SingleLocation(length, snr, prior) for prior in points for length, snr in ((5, 1.0), (40, 9.0))]
    risks, errors = bayes_risks(tasks)
    for i, task in enumerate(tasks):
        alone = bayes_risks([task])
        assert (alone[0][0], alone[1][0]) == (risks[i], errors[i])
    fewer = th.Quadrature(1e-6, nodes=64, points=(40, 72))
    risks, _ = bayes_risks(tasks, method=fewer)
    np.testing.assert_allclose(risks, [th.bayes_risk(task, fewer) for task in tasks], rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_bayes_risks_of_every_prior_by_the_default_method(prior):
    snrs = (0.1, 0.3) if prior == "mixture" else (0.05, 0.2)
    tasks = [th.SingleLocation(length, snr, PRIORS[prior]) for length in (3, 20) for snr in snrs]
    method = th.Quadrature(1e-3)
    risks, errors = bayes_risks(tasks, method=method)
    single, own = th.bayes_risk(tasks[-1], method, with_error=True)
    assert abs(float(risks[-1] - single)) <= float(errors[-1] + own)
    assert np.all(errors < 1e-2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "softmax" else pytest.mark.slow) for name in ACTIVATIONS]
)
def test_population_risks_are_those_of_single_calls(name):
    activation, method = ACTIVATIONS[name]
    tasks, orders = sweep(4, lengths=(3, 1000 if name != "sampled" else 4)), [start(i) for i in range(4)]
    activations = [activation(i) for i in range(4)]
    risks, errors = population_risks(tasks, activations, orders, method=method)
    for i in range(4):
        risk, error = th.population_risk(tasks[i], activations[i], orders[i], method, with_error=True)
        np.testing.assert_allclose(risks[i], risk, rtol=0, atol=1e-12)
        np.testing.assert_allclose(errors[i], error, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "bayes"])
def test_default_methods_agree_within_their_errors(name):
    tasks, orders = sweep(3, lengths=(3, 50)), [start(i) for i in range(3)]
    activations = [ACTIVATIONS[name][0](i) for i in range(3)]
    of_bayes = lambda i: th.bayes_risk(tasks[i], with_error=True)  # noqa: E731
    of_heads = lambda i: th.population_risk(tasks[i], activations[i], orders[i], with_error=True)  # noqa: E731
    for found, single in [(population_risks(tasks, activations, orders), of_heads), (bayes_risks(tasks), of_bayes)]:
        assert np.all(found[1] < 1e-5)
        for i in range(3):
            risk, error = single(i)
            assert abs(float(found[0][i] - risk)) <= float(found[1][i] + error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "softmax1", "bayes"])
def test_flows_are_those_of_single_calls(name):
    activation, method = ACTIVATIONS[name]
    for lengths, step_size in [((3, 6), 0.0), ((4,), np.array([0.0, 0.5, 0.5]))]:
        tasks, orders = sweep(3, lengths), [start(i) for i in range(3)]
        activations = [activation(i) for i in range(3)]
        options = {"method": method, "corrector_points": 64, "progress": False}
        found = gradient_flows(tasks, activations, orders, [0.0, 1.0, 2.0], step_size=step_size, **options)
        i = 2
        own = float(np.broadcast_to(step_size, 3)[i])
        single = th.gradient_flow(tasks[i], activations[i], orders[i], [0.0, 1.0, 2.0], step_size=own, **options)
        assert found[i].settings == single.settings
        assert found[i].task is tasks[i]
        np.testing.assert_allclose(found[i].order.m, single.order.m, atol=1e-9)
        np.testing.assert_allclose(found[i].order.r, single.order.r, atol=1e-9)
        np.testing.assert_allclose(found[i].risk, single.risk, atol=1e-9)
        assert [int(each.result) for each in found] == [0, 0, 0]


@pytest.mark.slow
def test_flows_by_the_default_method():
    tasks, orders, each = sweep(3, (3, 6)), [start(i) for i in range(3)], [th.Softmax()] * 3
    found = gradient_flows(tasks, each, orders, [0.0, 2.0], progress=False)
    single = th.gradient_flow(tasks[1], each[1], orders[1], [0.0, 2.0], progress=False)
    np.testing.assert_allclose(found[1].order.m, single.order.m, atol=1e-6)
    np.testing.assert_allclose(found[1].risk, single.risk, atol=1e-6)


# --- alone and in company ----------------------------------------------------------------------------------------


def test_a_point_has_the_same_bits_in_any_company():
    company = sweep(1000, lengths=(5, 9))
    point, other, last = company[500], company[:3], company[:999]
    orders = [start(i) for i in range(1000)]
    for call in (
        lambda tasks, orders: bayes_risks(tasks, method=th.Quadrature(1e-4, nodes=24, points=(9,))),
        lambda tasks, orders: population_risks(
            tasks, [th.Softmax()] * len(tasks), orders, method=th.Quadrature(1e-4, 16, 16)
        ),
    ):
        alone = np.array(call([point], orders[500:501]))[:, 0]
        for tasks, states, place in [
            ([point, *other], [orders[500], *orders[:3]], 0),
            ([*other, point], [*orders[:3], orders[500]], 3),
            (company, orders, 500),
            ([*last, point], [*orders[:999], orders[500]], 999),
        ]:
            np.testing.assert_array_equal(np.array(call(tasks, states))[:, place], alone)


@pytest.mark.parametrize("step_size", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_flow_has_the_same_bits_in_any_company(step_size):
    tasks, orders = sweep(11), [start(i) for i in range(11)]
    options = {"step_size": step_size, "corrector_points": 64, "method": HEADS, "progress": False}

    def run(index):
        chosen = [tasks[i] for i in index], [th.Softmax()] * len(index), [orders[i] for i in index]
        return gradient_flows(*chosen, [0.0, 1.0, 3.0], **options)

    alone = run([4])[0]
    for index in ([4, 1, 2], [1, 2, 4], [*range(11)], [*range(5, 11), 0, 1, 2, 3, 4]):
        found = run(index)[index.index(4)]
        np.testing.assert_array_equal(found.order.m, alone.order.m)
        np.testing.assert_array_equal(found.order.r, alone.order.r)
        np.testing.assert_array_equal(found.risk, alone.risk)


# --- compilations ------------------------------------------------------------------------------------------------


SWEEPS = ((_each, "_loop"), (flow, "_solve"))


def compilations(call, functions=SWEEPS):
    """How often the functions of modules are traced: the loop over points and the solver, unless given."""
    counts = {}
    for module, name in functions:
        body, seen = traces(getattr(module, name).__wrapped__)
        counts[name] = (module, getattr(module, name), eqx.filter_jit(body), seen)
    try:
        for name, (module, _, counted, _) in counts.items():
            setattr(module, name, counted)
        call()
    finally:
        for name, (module, before, _, _) in counts.items():
            setattr(module, name, before)
    return {name: len(seen) for name, (_, _, _, seen) in counts.items()}


def test_a_thousand_points_are_compiled_once():
    grid = [
        th.SingleLocation(length, snr, th.sign_flips([0.0, 0.0], [a, b]))
        for length in (5, 50)
        for snr in np.linspace(0.5, 1.5, 20)
        for a in (0.3, 0.4, 0.5, 0.6, 0.7)
        for b in (0.3, 0.4, 0.5, 0.6, 0.7)
    ]
    given = th.Quadrature(1e-3, nodes=16, points=(6, 6))
    assert compilations(lambda: bayes_risks(grid, method=given))["_loop"] == 1
    softmax = lambda tasks: population_risks(  # noqa: E731
        tasks, [th.Softmax()] * len(tasks), [start(0, 2)] * len(tasks), method=th.Quadrature(1e-3)
    )
    assert compilations(lambda: softmax(grid))["_loop"] == 2  # nodes needed, and the risk
    assert compilations(lambda: softmax(grid[-3:]))["_loop"] == 2


@pytest.mark.parametrize("name", ["Bayes risk", pytest.param("population risk", marks=pytest.mark.slow)])
def test_single_calls_on_points_share_compiled_code(name):
    """Of thirteen tasks with twelve pairs of counts; otherwise a long loop runs out of memory maps."""
    tasks = [th.SingleLocation(5, snr, th.sign_flips([0.0, 0.0], [0.8, 0.5])) for snr in np.linspace(0.5, 8, 13)]
    if name == "Bayes risk":
        module, single = bayes, lambda task: th.bayes_risk(task, th.Quadrature(1e-4))
        counts = {bayes.fitted_to_bayes(task, 1e-4).points for task in tasks}
    else:
        heads = [th.OrderParameters(m, m @ m.T) for m in (jnp.sqrt(task.snr) * jnp.eye(2) for task in tasks)]
        exact = th.Quadrature(1e-4)
        counts = {exact.fitted(t, th.BayesSoftmax("norm"), o).points for t, o in zip(tasks, heads, strict=True)}
        module = risk
        single = lambda task: th.population_risk(task, th.BayesSoftmax("norm"), heads[tasks.index(task)], exact)  # noqa: E731
    assert len(counts) > 8
    assert compilations(lambda: [single(task) for task in tasks], ((module, "_integrated"),))["_integrated"] <= 5


@pytest.mark.slow
def test_the_solver_is_compiled_as_often_for_many_points():
    def run(count):
        tasks = sweep(count, (3, 6))
        gradient_flows(tasks, [th.Softmax()] * count, [start(0)] * count, [0.0, 1.0], progress=False)

    assert compilations(lambda: run(24)) == compilations(lambda: run(9))


def test_threads_compute_where_their_caller_does(monkeypatch):
    """And as many as XLA has."""
    used = []
    body = _each._loop

    def loop(*args):
        used.append((threading.get_ident(), jax.config.jax_default_device))
        return body(*args)

    monkeypatch.setattr(_each, "_loop", loop)
    monkeypatch.setenv("NPROC", "3")
    assert _each._threads() == 3
    points, chosen = np.arange(400.0), np.arange(400) % 7 > 0
    with jax.default_device(jax.devices()[-1]):
        found = _each.each(_twice, points, chosen, None)
    np.testing.assert_array_equal(found, np.where(chosen, 2 * points, np.nan))
    assert len(used) == 3
    assert {device for _, device in used} == {jax.devices()[-1]}
    assert threading.get_ident() in {thread for thread, _ in used} != {threading.get_ident()}


def _twice(point, shared):
    return 2 * point


# --- hopeless points and refusals --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hopeless_point_is_nan_and_leaves_the_others():
    tasks, orders = sweep(3), [start(i) for i in range(3)]
    hopeless = th.SingleLocation(5, 1e300, FLIP)
    infinite = eqx.tree_at(lambda t: t.snr, tasks[0], jnp.asarray(jnp.inf))
    several, states = [tasks[0], hopeless, infinite, *tasks[1:]], [orders[0], *orders]
    states = [orders[0], orders[0], orders[0], *orders[1:]]
    softmax = lambda tasks, orders: ([th.Softmax()] * len(tasks), orders)  # noqa: E731
    for before, after in [
        (bayes_risks(tasks), bayes_risks(several)),
        (population_risks(tasks, *softmax(tasks, orders)), population_risks(several, *softmax(several, states))),
    ]:
        for plain, with_others in zip(before, after, strict=True):
            assert np.isnan(with_others[1:3]).all()
            np.testing.assert_array_equal(np.delete(np.asarray(with_others), [1, 2]), plain)
    flows = gradient_flows(several, *softmax(several, states), [0.0, 1.0], progress=False)
    plain = gradient_flows(tasks, *softmax(tasks, orders), [0.0, 1.0], progress=False)
    assert [int(each.result) for each in flows] == [0, 1, 1, 0, 0]
    assert np.isnan(flows[1].risk).all()
    np.testing.assert_array_equal(flows[3].risk, plain[1].risk)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, a, o: bayes_risks([]), "tasks: expected a sequence of at least one SingleLocation"),
        (
            lambda t, a, o: bayes_risks([t[0], th.SingleLocation(5, 1.0, th.one_hot(1))]),
            r"tasks\[1\]: expected classes",
        ),
        (
            lambda t, a, o: bayes_risks([t[0], th.SingleLocation(5, 1.0, th.sign_flips([1.0], [0.0]))]),
            r"tasks\[1\]: expected classes, shapes and fixed fields as in tasks\[0\]",
        ),
        (lambda t, a, o: population_risks(t, [], o), "activations: expected a sequence of at least one Activation"),
        (lambda t, a, o: population_risks(t, a[:1], o), "activations: expected one for each of 2 tasks, got 1"),
        (lambda t, a, o: population_risks(t, a, o[:1]), "orders: expected one for each of 2 tasks, got 1"),
        (lambda t, a, o: population_risks(t, [a[0], th.Softmax1()], o), r"activations\[1\]: expected classes"),
        (lambda t, a, o: population_risks(t, a, [start(0, 2)] * 2), "order: expected m with F = 1 features"),
        (
            lambda t, a, o: gradient_flows(t, a, o, [1.0], step_size=[0.1, 0.2, 0.3]),
            "step_size: expected one number or one for each of 2 tasks",
        ),
        (
            lambda t, a, o: gradient_flows(sweep(2, (3, 4)), a, o, [1.0], step_size=0.1),
            r"tasks: expected one length where step_size is not 0, got \[3, 4\]",
        ),
        (lambda t, a, o: gradient_flows(t, a, o, [1.0, 0.5]), "times: expected strictly increasing times"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(sweep(2), [th.Softmax()] * 2, [start(0), start(1)])


# --- many tasks that share the noise ------------------------------------------------------------------------------

STATES = {
    "random": random_state(5, heads=3, features=2, m=0.6, w=0.5),
    "silent": th.OrderParameters(np.zeros((3, 2)), np.zeros((3, 3))),
    "identical": th.OrderParameters([[1.0, 0.5]] * 3, [[1.25] * 3] * 3),
    "far": random_state(6, heads=2, features=2, m=3.0, w=1.0),
    "one": random_state(7, heads=1, features=2, m=1.0, w=0.3),
}
SHARED = {
    "softmax": (th.Softmax(0.7), lambda i: th.sign_flips([0.0, 1.0], [0.5 + 0.1 * i, 0.3])),
    "softmax1": (th.Softmax1(0.5, 3.0), lambda i: th.one_hot(2, [0.1 + 0.05 * i, 0.9 - 0.05 * i])),
    "gaussian": (th.Softmax(), lambda i: th.gaussian([0.5, 0.0], [0.2 * i, 1.0])),
    "mixture": (
        th.Softmax1(-1.0, 2.0),
        lambda i: th.GaussianMixture([0.3, 0.7], [[1.0, 0], [0, -1]], [np.eye(2) * 0.1 * i, np.zeros((2, 2))]),
    ),
}


LENGTHS = {"random": 3, "silent": 10, "identical": 10**6, "far": 50, "one": 5}
FEW = {("softmax", "random"), ("softmax1", "far"), ("gaussian", "silent"), ("mixture", "one")}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        pytest.param(name, state, marks=() if (name, state) in FEW else pytest.mark.slow)
        for name in SHARED
        for state in STATES
    ],
)
def test_tasks_that_share_the_noise_are_taken_by_one_functional(name, state, monkeypatch):
    """ν over three decades: within the stated errors of single calls, which are below the tolerance."""
    (activation, prior), length = SHARED[name], LENGTHS[state]
    tasks = [th.SingleLocation(length, 0.01 * 2.0**i, prior(i)) for i in range(9)]
    monkeypatch.setattr("theory.risk.fit_each", lambda *given: [])  # nothing is left for the ordinary way
    risks, errors = population_risks(tasks, [activation] * 9, [STATES[state]] * 9)
    assert np.all(errors < 1e-8)
    for i in (0, 4, 8):
        risk, error = th.population_risk(tasks[i], activation, STATES[state], th.Quadrature(2e-9), with_error=True)
        assert abs(float(risks[i] - risk)) <= 1e-14 * length + float(errors[i] + error)


def test_a_functional_has_an_error_that_tells():
    """With far too few nodes it misses by much, and says so."""
    tasks = [th.SingleLocation(10, 0.3 * (i + 1), th.sign_flips([0.0, 1.0], [1.0, 0.3])) for i in range(8)]
    given = [th.Softmax()] * 8, [STATES["random"]] * 8
    loose, errors = population_risks(tasks, *given, method=th.Quadrature(1e-2))
    exact, _ = population_risks(tasks, *given, method=th.Quadrature(1e-11))
    missed = np.abs(np.asarray(loose - exact))
    assert np.all(missed <= errors)
    assert 1e-9 < missed.max() < 1e-2


def test_what_shares_no_noise_goes_the_ordinary_way():
    states = [STATES["random"]] * 8 + [random_state(i, heads=3, features=2, m=0.3, w=0.3) for i in range(3)]
    tasks = [th.SingleLocation(10, 0.1 * (i + 1), th.sign_flips([0.0, 1.0], [1.0, 0.3])) for i in range(11)]
    risks, errors = population_risks(tasks, [th.Softmax()] * 11, states)
    assert np.all(errors < 1e-8)
    for i in (0, 8):
        risk, error = th.population_risk(tasks[i], th.Softmax(), states[i], with_error=True)
        assert abs(float(risks[i] - risk)) <= float(errors[i] + error)
