"""`headsplit figure`: every figure by its name, computed once, changed by --set, all of them two at a time."""

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import xarray as xr
from matplotlib.figure import Figure
from typer.testing import CliRunner

from compare import load
from compare.driver import only_driver
from compare.lines import Line
from headsplit import figures
from headsplit.cli import app

runner = CliRunner()


@dataclass(frozen=True)
class Configuration:
    """Of a figure that is computed in no time."""

    sizes: tuple[int, ...] = (1, 2)
    rate: float = 0.5
    name: str = "a"
    seed: int = 0

    def check(self):
        if self.rate < 0:
            raise ValueError("rate: expected a number >= 0")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Two figures, `one` and `two`, in an empty directory; the lines that were computed."""
    monkeypatch.chdir(tmp_path)
    computed: list[str] = []

    def line(group, value):
        computed.append(group)
        if value < 0 or (Path("stop").exists() and group == "b"):
            raise KeyboardInterrupt
        return xr.Dataset({"value": value})

    module = ModuleType("tiny_figure")
    module.Configuration, module.SMALL, module.FULL = Configuration, Configuration(), Configuration(sizes=(1, 2, 3))
    module.lines = lambda c: [
        Line("a", "first", lambda: line("a", float(sum(c.sizes)))),
        Line("b", "second", lambda a: line("b", c.rate * float(a["value"])), ("a",)),
    ]
    module.numbers = lambda store: {"b": float(store["b"]["value"])}

    def draw(store):
        figure = Figure(figsize=(1, 1))
        figure.subplots().plot([0, 1], [0, float(store["b"]["value"])])
        return figure

    module.draw = draw
    monkeypatch.setitem(sys.modules, "tiny_figure", module)
    entries = {name: figures.Entry(f"shows {name}", "tiny_figure", "tiny_figure") for name in ("one", "two")}
    monkeypatch.setattr(figures, "FIGURES", entries)
    monkeypatch.setattr(figures, "NAMES", tuple(entries))
    return computed


def call(*words):
    return runner.invoke(app, ["figure", *words, "--no-progress"])


def test_a_figure_is_computed_once_and_drawn_again(made):
    done = call("one")
    assert done.exit_code == 0, done.output
    folder = Path("results/figures/one")
    assert {path.name for path in folder.glob("[!.]*")} == {"result.zarr", "numbers.json", "one.pdf", "one.png"}
    assert json.loads((folder / "numbers.json").read_text()) == {"b": 1.5}
    assert "b  1.5" in done.output
    assert "not recomputed" in call("one").output
    assert call("one", str(folder)).exit_code == 0
    assert made == ["a", "b"]


def test_two_drivers_of_one_folder(made):
    """The second, of another figure too, is refused before it computes or writes."""
    folder = Path("results/figures/one")
    folder.mkdir(parents=True)
    with only_driver(folder):
        for words in (["one"], ["two", "--out", str(folder)]):
            refused = call(*words)
            assert refused.exit_code == 2
            assert f"in use by another driver (process {os.getpid()} on " in refused.output.replace("\n", "")
        assert {path.name for path in folder.iterdir()} == {".lock", "driver.json"}
    assert not made
    assert call("one").exit_code == 0


def test_full_and_changed_ones_are_others(made):
    assert call("one", "--full").exit_code == 0
    assert load(Path("results/figures/one-full/result.zarr")).configuration["sizes"] == [1, 2, 3]
    changed = call("one", "--set", "rate=2", "--set", "sizes=[4, 5]", "--set", "name=b", "--out", "changed")
    assert changed.exit_code == 0, changed.output
    assert json.loads(Path("changed/numbers.json").read_text()) == {"b": 18.0}
    assert load(Path("changed/result.zarr")).configuration["name"] == "b"
    refused = call("one", "--out", "changed")
    assert refused.exit_code == 2
    assert "rate: 0.5 here, 2.0 there" in refused.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name: expected one figure (--list shows all), or --all"),
        (["three"], "name: expected one of one, two"),
        (["one", "--all"], "name: expected one figure"),
        (["--all", "--set", "rate=1"], "all: expected neither a store nor --set"),
        (["one", "--set", "speed=1"], "set: expected a field of one (sizes, rate, name, seed), got 'speed=1'"),
        (["one", "--set", "rate=fast"], "set: expected rate to be like 0.5, got fast"),
        (["one", "--set", "rate=-1"], "rate: expected a number >= 0"),
        (["compare", "--set", "dim=3"], "set: compare takes the options of `headsplit compare`"),
        (["sweep"], "store: expected a folder written by `headsplit sweep`"),
    ],
)
def test_wrong_words_are_named(made, words, message):
    done = call(*words)
    assert done.exit_code == 2
    assert message in done.output
    assert not made


# stands for `headsplit figure NAME --out FOLDER --no-progress`: takes NAME seconds, or until Ctrl-C; "bad" fails
SLEEPER = """
import pathlib, signal, sys, time
name, _, folder, *options = sys.argv[1:]
path = pathlib.Path(folder)
path.mkdir(parents=True, exist_ok=True)
try:
    (path / "began").write_text(f"{time.time()} {options}")
    print(f"numbers of {name}", flush=True)
    time.sleep(0 if name == "bad" or (path / "went on").exists() else float(name))
except KeyboardInterrupt:
    (path / "went on").touch()
    print("headsplit figure: interrupted: 1 lines are kept", file=sys.stderr)
    sys.exit(130)
if name == "bad":
    print("a warning\\nheadsplit figure: out: expected another", file=sys.stderr)
    sys.exit(2)
(path / "ended").write_text(str(time.time()))
"""


@pytest.fixture
def sleepers(monkeypatch, tmp_path):
    """`--all` with other names, each a process that sleeps."""
    monkeypatch.chdir(tmp_path)

    def named(*names):
        monkeypatch.setattr(figures, "COMMAND", (sys.executable, "-S", "-c", SLEEPER))
        monkeypatch.setattr(figures, "NAMES", names)
        monkeypatch.setattr(figures, "title", lambda name: f"shows {name}")

    return named


def test_all_are_made_two_at_a_time(sleepers):
    sleepers("0.5", "2.5", "0.6")
    done = call("--all", "--full")
    assert done.exit_code == 0, done.output
    for name in figures.NAMES:
        assert f"{name}: shows {name}\nnumbers of {name}\n" in done.output
    began, ended = ([float(Path(f"results/figures/{name}-full/{file}").read_text().split()[0])
                     for name in figures.NAMES] for file in ("began", "ended"))  # fmt: skip
    assert began[1] < ended[0] < began[2] < ended[1]
    assert "['--no-progress', '--full']" in Path("results/figures/0.5-full/began").read_text()


def test_all_make_the_others_when_one_cannot_be_made(sleepers):
    sleepers("bad", "0.0")
    done = call("--all", "--out", "here")
    assert done.exit_code == 2
    assert done.output.endswith("headsplit figure: bad: out: expected another\n")
    assert "a warning" in done.output
    assert Path("here/0.0/ended").exists()


def test_all_pass_an_interruption_on_and_go_on_after_it(sleepers):
    sleepers("60.0", "61.0", "0.0")
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    stopped = call("--all")
    assert stopped.exit_code == 130
    assert stopped.output.count("1 lines are kept") == 2
    assert not Path("results/figures/0.0").exists()
    assert call("--all").exit_code == 0
    assert all(Path(f"results/figures/{name}/ended").exists() for name in figures.NAMES)


@pytest.mark.slow
def test_all_are_made_by_the_command_itself(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "NAMES", ("dilution", "spectrum"))
    done = call("--all")
    assert done.exit_code == 0, done.output
    assert all(Path(f"results/figures/{name}/{name}.pdf").exists() for name in figures.NAMES)


def test_the_result_of_another_figure_is_not_drawn(made, monkeypatch):
    call("one")
    monkeypatch.setitem(figures.FIGURES, "stages", figures.Entry("", "headsplit.stages", "figures.stages"))
    done = call("stages", "results/figures/one")
    assert done.exit_code == 2
    assert "expected a result of the figure 'stages', got one with a, b" in done.output


def test_every_name_has_its_module_and_its_place_in_the_gallery():
    listed = runner.invoke(app, ["figure", "--list"])
    assert listed.exit_code == 0
    gallery = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text(encoding="utf-8")
    for name in figures.FIGURES:
        assert name in listed.output
        assert f"`headsplit figure {name}`" in gallery
        computed, drawn = (import_module(module) for module in figures.FIGURES[name][1:])
        assert computed.SMALL != computed.FULL
        assert callable(drawn.draw)
        assert callable(drawn.numbers)
