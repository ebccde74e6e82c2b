"""`headsplit`: the commands. Thin: options in, one call, exit code out; heavy imports wait until they are needed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from headsplit.attention import PACKAGED, Text
from headsplit.attention import Configuration as Attended
from headsplit.bayes import Configuration as Plots
from headsplit.compare import Configuration, run
from headsplit.stages import Configuration as Staircases

app = typer.Typer(
    name="headsplit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RESULTS = Path("results")
_DEFAULT, _BAYES, _STAGES, _ATTENTION = Configuration(), Plots(), Staircases(), Attended()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headsplit {version('headsplit')}")
        raise typer.Exit


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _listed_whole(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _numbers(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name}: expected numbers with commas between them, got {text!r}") from error


@app.callback()
def _headsplit(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """How attention heads specialize: the order-parameter theory against SGD on the layer itself.

    A layer of H softmax attention heads learns to find the one informative among L tokens in D dimensions. As D
    grows, its overlaps m (heads with spikes) and r (heads with heads) follow an ordinary differential equation.
    `headsplit compare` solves it, trains the layer, and says whether the two agree. `headsplit stages` predicts when
    heads specialize, and `headsplit bayes` how close the layer comes to the least possible risk. `headsplit sweep`
    runs any of this over a grid of parameters. `headsplit attention` measures the heads of a pretrained transformer.

    Units: time is the clock τ = η·steps/D, with the learning rate η of order one; overlaps are per dimension,
    m = k·k*/D and r = k·k'/D; the signal in the informative token is √(ν/D) Σ_f θ_f k*_f in noise of variance one.

    Exit codes: 0 agreement or no verdict (even if all runs diverged), 1 disagreement (of a sweep: points that failed),
    2 wrong usage, 130 interrupted.
    """
    # "no GPU found" is no news on a machine without one
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)


@app.command()
def compare(
    length: Annotated[int, typer.Option(help="Tokens L >= 2.")] = _DEFAULT.length,
    heads: Annotated[int, typer.Option(help="Heads H >= 1.")] = _DEFAULT.heads,
    snr: Annotated[float, typer.Option(help="Signal-to-noise ratio ν >= 0.")] = _DEFAULT.snr,
    prior: Annotated[
        str,
        typer.Option(
            help="Law of the spikes' weights θ: sign_flips(mean, amplitude), one_hot(features), "
            "gaussian(mean, variance), discrete(points, weights), GaussianMixture(weights, means, covariances)."
        ),
    ] = _DEFAULT.prior,
    activation: Annotated[
        str,
        typer.Option(
            help="Attention activation: Softmax(temperature), Softmax1(bias, scale, trained), "
            "BayesSoftmax(bias, trained, weights) with numbers or 'norm' as its bias, or those of docs/limits.md."
        ),
    ] = _DEFAULT.activation,
    dim: Annotated[int, typer.Option(help="Dimensions D of the simulated layer.")] = _DEFAULT.dim,
    variance: Annotated[
        float, typer.Option(help="Variance r_0 of the keys at the start, per dimension.")
    ] = _DEFAULT.variance,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate η; a step advances τ by η/D.")
    ] = _DEFAULT.learning_rate,
    bias_rate: Annotated[
        float, typer.Option(help="κ_b of a trained bias: a step moves it with κ_b·η/D.")
    ] = _DEFAULT.bias_rate,
    scale_rate: Annotated[float, typer.Option(help="κ_c of a trained scale, likewise.")] = _DEFAULT.scale_rate,
    batch: Annotated[
        int, typer.Option(help="Fresh samples B per step; η/B is the theory's step size.")
    ] = _DEFAULT.batch,
    replicas: Annotated[
        int, typer.Option(help="Independent runs, each compared with its own theory.")
    ] = _DEFAULT.replicas,
    time: Annotated[float, typer.Option(help="End of the runs, τ = η·steps/D.")] = _DEFAULT.time,
    records: Annotated[
        int, typer.Option(help="Equally spaced times compared, 0 and the end included.")
    ] = _DEFAULT.records,
    loss: Annotated[
        str, typer.Option(help="'finite': ‖X_ε − f(X)‖²/D, or 'limit': its form at D → ∞.")
    ] = _DEFAULT.loss,
    level: Annotated[
        float, typer.Option(min=0.001, max=0.999, help="Bound on the false-alarm rate of the verdict.")
    ] = _DEFAULT.level,
    until: Annotated[
        float | None, typer.Option(help="The verdict covers τ up to here [default: the first split predicted].")
    ] = _DEFAULT.until,
    bands: Annotated[bool, typer.Option(help="Predict the scatter of single runs, and judge it.")] = _DEFAULT.bands,
    seed: Annotated[int, typer.Option(help="Seed of starts and data.")] = _DEFAULT.seed,
    out: Annotated[
        Path | None, typer.Option(help="Folder for store and figure [default: results/compare/ and what varies].")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.")] = True,
) -> None:
    """Train the layer by SGD, solve the theory from the same starts, and say whether they agree.

    Prints the verdict, and writes a labelled store (result.zarr) and a figure (compare.pdf, compare.png) into a folder
    named by what varies. A folder that holds the result already is read and drawn again, not recomputed.

    The defaults take about two minutes on two CPU cores. Cost grows as D² (a step costs D, and τ takes D/η steps).
    """
    from theory.names import parse_activation, parse_prior

    with _reported("compare"):
        configuration = Configuration(
            length=length,
            heads=heads,
            snr=snr,
            prior=parse_prior(prior).name,
            activation=parse_activation(activation).name,
            dim=dim,
            variance=variance,
            learning_rate=learning_rate,
            bias_rate=bias_rate,
            scale_rate=scale_rate,
            batch=batch,
            replicas=replicas,
            time=time,
            records=records,
            loss=loss,
            level=level,
            until=until,
            bands=bands,
            seed=seed,
        )
        folder = out if out is not None else RESULTS / "compare" / configuration.folder()
        agrees = run(configuration, folder, progress=progress, say=typer.echo)
    raise typer.Exit(1 if agrees is False else 0)


@app.command()
def bayes(
    prior: Annotated[
        list[str] | None,
        typer.Option(help="Law of θ, as for `compare`; may be given several times, each with --prior-heads."),
    ] = None,
    prior_heads: Annotated[
        list[int] | None, typer.Option(help="Heads H against ν, one for each prior [default: 2 2 3 3].")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens L >= 2.")] = _BAYES.length,
    snrs: Annotated[str, typer.Option(help="ν of the upper row, increasing, with commas.")] = _listed(_BAYES.snrs),
    heads: Annotated[str, typer.Option(help="H of the lower row, increasing, with commas.")] = _listed(_BAYES.heads),
    snr: Annotated[float, typer.Option(help="ν of the lower row.")] = _BAYES.snr,
    starts: Annotated[int, typer.Option(help="Starts of each search for an optimum.")] = _BAYES.starts,
    tolerance: Annotated[float, typer.Option(help="Absolute error aimed at for the risks.")] = _BAYES.tolerance,
    trained_snrs: Annotated[str, typer.Option(help="ν at which layers are trained.")] = _listed(_BAYES.trained_snrs),
    dim: Annotated[int, typer.Option(help="Dimensions D of the trained layers.")] = _BAYES.dim,
    variance: Annotated[float, typer.Option(help="Variance r_0 of their keys at the start.")] = _BAYES.variance,
    learning_rate: Annotated[float, typer.Option(help="Learning rate η.")] = _BAYES.learning_rate,
    batch: Annotated[int, typer.Option(help="Fresh samples B per step.")] = _BAYES.batch,
    time: Annotated[float, typer.Option(help="End of training, τ = η·steps/D.")] = _BAYES.time,
    bias_rate: Annotated[float, typer.Option(help="κ_b of trained biases (biases start far away).")] = _BAYES.bias_rate,
    replicas: Annotated[int, typer.Option(help="Layers trained for each point.")] = _BAYES.replicas,
    seed: Annotated[int, typer.Option(help="Seed of starts and data.")] = _BAYES.seed,
    out: Annotated[Path | None, typer.Option(help="Folder for store and figure [default: results/bayes].")] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.")] = True,
) -> None:
    """How close softmax, softmax-1 and Bayes-softmax come to the Bayes risk, against ν and against H.

    Lines are the best order parameters found from several starts (softmax-1 with its bias and scale, B-softmax with its
    biases at their best), points are layers trained by SGD at finite D, the dashed line is the Bayes risk.

    Prints every number (optima with the spread over starts, layers with their standard error), and writes a store
    (result.zarr) and a figure (bayes.pdf, bayes.png). Each line of the figure is stored as soon as it is finished:
    after Ctrl-C the same command goes on, and a folder that holds the result already is drawn again, not recomputed.
    The defaults take some four minutes on two CPU cores.
    """
    from headsplit.figures import run as make
    from theory.names import parse_prior

    with _reported("bayes"):
        if (prior is None) != (prior_heads is None):
            raise ValueError("prior_heads: expected one for each --prior, and none without")
        configuration = Plots(
            priors=_BAYES.priors if prior is None else tuple(parse_prior(text).name for text in prior),
            prior_heads=_BAYES.prior_heads if prior_heads is None else tuple(prior_heads),
            length=length,
            snrs=_numbers("snrs", snrs, float),
            heads=_numbers("heads", heads, int),
            snr=snr,
            starts=starts,
            tolerance=tolerance,
            trained_snrs=_numbers("trained_snrs", trained_snrs, float),
            dim=dim,
            variance=variance,
            learning_rate=learning_rate,
            batch=batch,
            time=time,
            bias_rate=bias_rate,
            replicas=replicas,
            seed=seed,
        )
        folder = out if out is not None else RESULTS / "bayes"
        make("bayes", configuration, folder, progress=progress, say=typer.echo)


@app.command()
def stages(
    prior: Annotated[
        list[str] | None,
        typer.Option(help="Law of θ, as for `compare`; may be given several times, each with --heads."),
    ] = None,
    heads: Annotated[list[int] | None, typer.Option(help="Heads H, one for each prior [default: 2 2].")] = None,
    activation: Annotated[str, typer.Option(help="Attention activation, as for `compare`.")] = _STAGES.activation,
    length: Annotated[int, typer.Option(help="Tokens L >= 2 (at L = 2 nothing splits).")] = _STAGES.length,
    snr: Annotated[float, typer.Option(help="Signal-to-noise ratio ν.")] = _STAGES.snr,
    dims: Annotated[str, typer.Option(help="D, increasing, with commas.")] = _listed_whole(_STAGES.dims),
    replicas: Annotated[
        str | None, typer.Option(help="Runs at each D, with commas [default: 200, beyond D = 1600 fewer, at least 50].")
    ] = None,
    shown: Annotated[
        int | None, typer.Option(help="The D whose distribution is drawn [default: the middle one].")
    ] = None,
    variance: Annotated[float, typer.Option(help="Variance r_0 of the keys at the start.")] = _STAGES.variance,
    learning_rate: Annotated[float, typer.Option(help="Learning rate η.")] = _STAGES.learning_rate,
    batch: Annotated[
        int, typer.Option(help="Fresh samples B per step; η/B is the step size that the prediction knows of.")
    ] = _STAGES.batch,
    loss: Annotated[str, typer.Option(help="'limit' or 'finite', as for `compare`.")] = _STAGES.loss,
    threshold: Annotated[
        float, typer.Option(help="A feature has split when the spread over heads is at this share of √(ν Var θ).")
    ] = _STAGES.threshold,
    samples: Annotated[
        int, typer.Option(help="Starts of the predicted distribution; it errs by about 1/samples in level.")
    ] = _STAGES.samples,
    coverage: Annotated[
        float, typer.Option(help="Runs end when this share has split along every feature, as predicted.")
    ] = _STAGES.coverage,
    records: Annotated[int, typer.Option(help="Records of a run, from which its times are read.")] = _STAGES.records,
    seed: Annotated[int, typer.Option(help="Seed of starts and data.")] = _STAGES.seed,
    out: Annotated[Path | None, typer.Option(help="Folder for store and figure [default: results/stages].")] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.")] = True,
) -> None:
    """When heads specialize: stage times against log D, predicted and measured, with the table of slopes.

    A split of the heads along a feature starts at √(r_0/D) and grows at a rate κ proportional to Var θ, so its time is
    log D/(2κ) and a constant. Both are predicted, with the distribution over starts and SGD's noise; nothing is fitted.
    They are measured on replicas of the exact chain of the order parameters (the law of SGD on the layer at any D).

    Prints slopes (as D → ∞, of the predicted medians at these D, fitted with their standard error), medians, and
    a Kolmogorov-Smirnov test for each D; writes a store (result.zarr) and a figure (stages.pdf, stages.png). Each line
    is stored as soon as it is finished: after Ctrl-C the same command goes on, and a folder that holds the result
    already is drawn again, not recomputed. The defaults take four to six minutes on two CPU cores; runs cost D·τ·B/η
    samples each.
    """
    from headsplit.figures import run as make
    from headsplit.stages import usual_replicas, usual_shown
    from theory.names import parse_activation, parse_prior

    with _reported("stages"):
        if (prior is None) != (heads is None):
            raise ValueError("heads: expected one for each --prior, and none without")
        sizes = _numbers("dims", dims, int)
        configuration = Staircases(
            priors=_STAGES.priors if prior is None else tuple(parse_prior(text).name for text in prior),
            heads=_STAGES.heads if heads is None else tuple(heads),
            activation=parse_activation(activation).name,
            length=length,
            snr=snr,
            dims=sizes,
            replicas=usual_replicas(sizes) if replicas is None else _numbers("replicas", replicas, int),
            shown=usual_shown(sizes) if shown is None else shown,
            variance=variance,
            learning_rate=learning_rate,
            batch=batch,
            loss=loss,
            threshold=threshold,
            samples=samples,
            coverage=coverage,
            records=records,
            seed=seed,
        )
        folder = out if out is not None else RESULTS / "stages"
        make("stages", configuration, folder, progress=progress, say=typer.echo)


@app.command()
def attention(
    model: Annotated[
        str,
        typer.Argument(
            help="'minilm' (all-MiniLM-L6-v2 as a package), a folder with a GPT-2 or BERT, or with --download "
            "a name 'owner/name' on the Hugging Face hub."
        ),
    ] = PACKAGED,
    text: Annotated[
        str | None,
        typer.Argument(
            help="A file of text, or - for standard input; a file alone is read by the default model "
            "[default: the first pages of Alice in Wonderland]."
        ),
    ] = None,
    selected: Annotated[
        int, typer.Option(help="N of the report: the N largest weights of a row are selected.")
    ] = _ATTENTION.selected,
    vectors: Annotated[
        str, typer.Option(help="What attention averages: 'inputs' of each layer, 'embeddings' or 'values'.")
    ] = _ATTENTION.vectors,
    normalize: Annotated[
        bool, typer.Option("--normalize/--raw", help="Divide each vector by its norm, or take it as it is.")
    ] = _ATTENTION.normalize,
    count: Annotated[
        str, typer.Option(help="Length of a causal row: its 'own', the tokens it may attend, or 'all'.")
    ] = _ATTENTION.count,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a text that is longer than the model's window.")
    ] = _ATTENTION.truncate,
    rows: Annotated[
        int | None, typer.Option(help="Query rows, equally spaced, that means are taken over [default: all].")
    ] = _ATTENTION.rows,
    experiments: Annotated[
        bool, typer.Option("--experiments/--no-experiments", help="The five experiments, or the report of heads alone.")
    ] = True,
    download: Annotated[bool, typer.Option("--download", help="Ask the hub for the model.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random directions.")] = _ATTENTION.seed,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for store, table and figures [default: results/attention/ and what varies]."),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.")] = True,
) -> None:
    """Measure the attention heads of a transformer on a text against the limits of normalization.

    For each layer: quartiles over heads of entropy, effective support, largest weight, mean distance of tokens left
    out, the fraction N_s/N of distinguishable tokens and the spectral norm of the softmax Jacobian, which heads are
    saturated, and the critical N; for each head the same in a table (heads.csv). Five experiments: distances with their
    bounds and expectations against text length and against N, the critical N against text length, N_s/N against N, and
    gradients against temperature.

    Prints the main numbers, and writes a store (result.zarr), the table and figures (attention_heads, attention; pdf
    and png). Each experiment is stored as soon as it is finished: after Ctrl-C the same command goes on, and a folder
    that holds the result already is drawn again, not recomputed. 72 heads on 512 tokens take some two minutes on two
    CPU cores; --rows 64 is faster.
    """
    from headsplit.attention import run as run_attention

    with _reported("attention"):
        if text is None and model != PACKAGED and not Path(model).is_dir():
            model, text = PACKAGED, model
        run_attention(
            model,
            Text.read(text),
            folder=out,
            results=RESULTS / "attention",
            experiments=experiments,
            download=download,
            progress=progress,
            say=typer.echo,
            selected=selected,
            vectors=vectors,
            normalize=normalize,
            count=count,
            truncate=truncate,
            rows=rows,
            seed=seed,
        )


@app.command()
def sweep(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What is run, over what, and where.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for store and figures [default: results/sweep/ and the file's name].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a store that lacks points of this configuration, or extend it.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run points again that failed; goes on like --resume.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Print what is stored, and stop.")] = False,
    executor: Annotated[
        str | None, typer.Option(help="'none', 'processes', 'dask' or 'submitit', instead of the file's.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers, instead of the file's [default: one a core].")] = None,
    progress: Annotated[bool, typer.Option(help="A progress bar.")] = True,
) -> None:
    """Run every point of a grid, keep each, and draw figures of it; stopped, it goes on where it was.

    Prints the plan (points, calls, memory, time), and writes a store (store) and the figures into a folder. A
    store that has every point is read and drawn again, not recomputed. Points that fail, or diverge, are kept as
    failed with the reason. Ctrl-C keeps what has ended.

    A file, with all that it may hold:

    \b
      run = "train_reduced"        # gradient_flow, bayes_risk, population_risk, optimal_risk, predict_stages, train,
                                   # train_reduced, agreement, or your own "package.module:function"
      replicas = 4                 # of each point; leave it out for one
      seed = 0                     # of starts and data
      memory = "256 MiB"           # of one call, roughly

    \b
      [fixed]                      # parameters of the run by name; text for prior and activation
      length = 4
      prior = "sign_flips(mean=[0.0], amplitude=[1.0])"
      activation = "Softmax()"
      heads = 2
      variance = 0.1
      learning_rate = 2.0
      time = 20.0
      batch = 4

    \b
      [grid]                       # what is swept: lists, ranges, parts of a prior
      snr = [1.0, 2.0, 4.0]
      dim = {from = 1e3, to = 1e5, count = 3, spacing = "log", whole = true}
      "prior.amplitude[0]" = [0.5, 1.0]

    \b
      [executor]                   # leave it out to run in this process
      kind = "processes"           # of one thread each; or "dask", "submitit"
      workers = 2                  # with "dask" too, which instead takes address = "tcp://..." of a scheduler;
                                   # "submitit": folder = "slurm-logs", cluster = "slurm" or "local",
                                   # parameters = {slurm_partition = "cpu", timeout_min = 60}

    \b
      [[figure]]                   # any number: curves with x, hue, at, band ("quartiles", "error", "range") ...
      kind = "curves"
      quantity = "risk"
      x = "time"
      hue = "snr"
      at = {dim = 1000, "prior.amplitude[0]" = 1.0}

    \b
      [[figure]]                   # ... or heat_map with x, y, at, reduce ("mean", "median")
      kind = "heat_map"
      quantity = "risk"
      x = "dim"
      y = "snr"
      at = {time = 20.0, "prior.amplitude[0]" = 1.0}

    Ranges are rounded to 12 digits; spacing is "linear" unless given. `at` takes values as they are in the sweep.

    Exit codes: 0 all points done, 1 some failed, 2 wrong usage, 130 interrupted.
    """
    from headsplit import sweep as sweeping

    with _reported("sweep"):
        given = sweeping.Configuration.read(configuration).on(executor, workers)
        folder = out if out is not None else RESULTS / "sweep" / configuration.stem
        if status or dry_run:
            text = sweeping.status(folder) if status else sweeping.planned(given, folder, retry=retry_failed)
            typer.echo(text)
            raise typer.Exit
        options = {"resume": resume, "retry": retry_failed, "progress": progress}
        whole = sweeping.run(given, folder, **options, say=typer.echo)
    raise typer.Exit(0 if whole else 1)


@app.command()
def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure; --list shows all.")] = None,
    store: Annotated[
        Path | None, typer.Argument(help="A folder with a stored result: drawn again, nothing is computed.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the names and what they show, and stop.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every figure, two at a time.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The size of a paper, instead of a small one.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a number of the configuration; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for stores and figures [default: results/figures/NAME].")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.")] = True,
) -> None:
    """Compute a figure of the papers, unless its folder holds it, and draw it from its store.

    Prints the figure's key numbers, and writes a store (result.zarr), the numbers (numbers.json) and the figure (pdf
    and png). Each part is stored as soon as it is finished: after Ctrl-C the same command goes on, and a result that
    is there is drawn again, not recomputed. --full computes at larger sizes into a folder of its own
    (results/figures/NAME-full), which takes hours for some.
    """
    from headsplit import figures

    with _reported("figure"):
        if listed:
            typer.echo(figures.listed())
            raise typer.Exit
        if every == (name is not None):
            raise ValueError("name: expected one figure (--list shows all), or --all")
        if every and (store or changes):
            raise ValueError("all: expected neither a store nor --set, which are for one figure")
        if name is not None and store is not None:
            figures.redraw(name, store, say=typer.echo)
            raise typer.Exit
        root = RESULTS / "figures" if out is None else out
        if name is None:
            figures.make_all(root, full=full, progress=progress, say=typer.echo)
            raise typer.Exit
        folder = root / figures.folder_name(name, full=full) if out is None else out
        figures.make(name, folder, full=full, changes=changes or (), progress=progress, say=typer.echo)


@contextmanager
def _reported(command: str) -> Iterator[None]:
    """Errors that the user can mend, as one line and an exit code."""
    from compare import InUse

    try:
        yield
    except (ValueError, OSError, ImportError, InUse) as error:
        code, message = 2, str(error)
    except KeyboardInterrupt as error:
        code, message = 130, str(error) or "interrupted: what is stored stays, nothing else is kept"
    else:
        return
    typer.echo(f"headsplit {command}: {message}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command."""
    app(prog_name="headsplit")
