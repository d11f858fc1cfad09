"""Weights & Biases, online or offline."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.configurable import Problem
from torchtitan.errors import ConfigError
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink
from torchtitan.optional import is_installed, require
from torchtitan.secrets import masked

Keyword = bool | int | float | str | list[str] | dict[str, str]
_OURS = ("config", "dir", "resume")


class WandB(Sink):
    """Logs every row to a W&B run whose overview shows the resolved config.

    ``global_step`` is the x axis of every chart. The id of the W&B run is kept in ``wandb_run_id.txt`` in the run
    folder, so that a resumed run continues the same charts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Settings of the W&B sink (extra ``wandb``)."""

        enabled: bool = False
        """Whether the run is sent to W&B. `WANDB_MODE=offline` in the environment keeps it on disk."""

        init: dict[str, Keyword] = field(default_factory=dict)
        """Keywords for `wandb.init`, such as `project`, `entity`, `name`, `group`, `tags`, `mode`. Those not given
        come from W&B's own environment variables. `config`, `dir` and `resume` are set by the run."""

        def check(self) -> Iterator[Problem]:
            """The package is there if it is asked for; keywords that the run sets are left to it."""
            if self.enabled and not is_installed("wandb"):
                yield Problem(
                    "enabled",
                    True,
                    "the package 'wandb' is not installed",
                    "run: pip install 'torchtitan[wandb]'",
                )
            for name in _OURS:
                if name in self.init:
                    yield Problem(f"init.{name}", self.init[name], "is set by the run", "remove it")

        def build(self, *, folder: Path, run: RunInfo) -> "WandB":
            """Start the W&B run, or continue the one of this run folder.

            Raises:
                ConfigError: if ``init`` has a keyword that ``wandb.init`` does not know.
            """
            wandb: Any = require("wandb", extra="wandb", purpose="metrics.wandb")
            about = masked(asdict(run))
            config = about.pop("config")
            keywords: dict[str, Any] = {"dir": str(folder), "config": {"run": about, **config}}
            id_file = folder / "wandb_run_id.txt"
            if run.start_step and id_file.exists():
                run_id = id_file.read_text(encoding="utf-8").strip()
                keywords |= {"id": run_id, "resume": "allow"}
            try:
                wandb_run = wandb.init(**keywords | self.init)
            except TypeError as error:
                raise ConfigError(
                    f"metrics.wandb.init={self.init}: wandb.init refused it ({error}); "
                    "see its documentation for the keywords it takes"
                ) from error
            id_file.write_text(wandb_run.id + "\n", encoding="utf-8")
            return WandB(wandb_run, config)

    def __init__(self, wandb_run: Any, config: dict[str, Any]) -> None:
        self._run = wandb_run
        self._run.define_metric("*", step_metric="global_step")
        path = Path(self._run.dir) / "resolved_config.json"
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    def log(self, rows: list[Row]) -> None:
        """Send the rows."""
        for row in rows:
            self._run.log(row)

    def log_texts(self, step: int, texts: Sequence[GeneratedText]) -> None:
        """Send the texts as a table."""
        wandb: Any = require("wandb", extra="wandb", purpose="metrics.wandb")
        rows = [[step, text.prompt, text.text, text.finish_reason] for text in texts]
        table = wandb.Table(columns=["global_step", "prompt", "text", "finish_reason"], data=rows)
        self._run.log({"global_step": step, "samples": table})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()
