"""The curves of a run as one picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.config.configurable import Problem
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import Row, Sink
from torchtitan.metrics.sinks.jsonl import read_rows
from torchtitan.optional import is_installed, require

_PANELS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # panel: (label of its y axis with the unit, [(metric, legend)])
    "loss": ("loss", [("loss", "training"), ("validation_loss", "validation")]),
    "lr": ("learning rate", [("lr", "lr")]),
    "grad_norm": ("gradient norm before clipping", [("grad_norm", "grad_norm")]),
    "speed": ("tokens per second, all ranks", [("tokens_per_second", "tokens_per_second")]),
    "memory": ("peak memory (GiB)", [("peak_memory_gib", "peak_memory_gib")]),
}
_LAYOUT = [["loss", "loss", "lr"], ["grad_norm", "speed", "memory"]]


class Plots(Sink):
    """Draws ``curves.png`` when the run ends, however it ends, from ``metrics.jsonl``: all of a resumed run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Settings of the picture."""

        format: Literal["png", "svg"] = "png"
        """File type of `curves.<format>` in the run folder."""

        def check(self) -> Iterator[Problem]:
            """The package is there if it is needed."""
            if self.enabled and not is_installed("matplotlib"):
                yield Problem(
                    "enabled",
                    True,
                    "the package 'matplotlib' is not installed",
                    "run: pip install matplotlib, or set it to False",
                )

        def build(self, *, folder: Path, run: RunInfo) -> "Plots":
            """Remember where to draw."""
            return Plots(folder, run, self.format)

    def __init__(self, folder: Path, run: RunInfo, file_format: str) -> None:
        self._rows_path = folder / "metrics.jsonl"
        self._path = folder / f"curves.{file_format}"
        self._run = run

    def log(self, rows: list[Row]) -> None:
        """Nothing: the rows are in the file when they are drawn."""

    def close(self) -> None:
        """Draw, if there is anything to draw."""
        rows = read_rows(self._rows_path) if self._rows_path.exists() else []
        if rows:
            run = self._run
            size = f"{run.n_params:,} parameters, {run.tokens_per_step_global:,} tokens per step"
            plot_curves(rows, self._path, title=f"{run.recipe}: {size}")


def plot_curves(rows: list[Row], path: Path, *, title: str) -> None:
    """Draw loss, learning rate, gradient norm, speed and memory over the steps.

    Args:
        rows: of one run, in order of steps.
        path: of the picture; its suffix is the file type, ``.png`` or ``.svg``.
        title: above the curves.
    """
    figure_module: Any = require("matplotlib.figure", extra="dev", purpose="metrics.plots")
    figure = figure_module.Figure(
        figsize=(14, 7.5), layout="constrained"
    )  # no pyplot: no display, no global state
    figure.suptitle(title)
    for panel, axes in figure.subplot_mosaic(_LAYOUT).items():
        label, curves = _PANELS[panel]
        drawn = [legend for metric, legend in curves if _draw(axes, rows, metric, legend)]
        axes.set(title=label, xlabel="step")
        axes.grid(visible=True, alpha=0.3)
        if panel in ("speed", "memory"):
            axes.set_ylim(bottom=0)  # else noise looks like a slump
        if len(drawn) > 1:
            axes.legend()
        if not drawn:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
    figure.savefig(path, dpi=110)


def _draw(axes: Any, rows: list[Row], metric: str, legend: str) -> bool:
    points = [(row["global_step"], row[metric]) for row in rows if metric in row]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    sparse = metric == "validation_loss" or len(points) == 1
    axes.plot(
        steps, values, label=legend, linewidth=1.2, marker="o" if sparse else None, markersize=4
    )
    return True
