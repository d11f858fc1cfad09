"""Saving and resuming: what a training loop calls."""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchtitan.checkpoint.agreement import TIMEOUT_S, Agreement
from torchtitan.checkpoint.files import HashedFiles
from torchtitan.checkpoint.folder import CheckpointFolder
from torchtitan.checkpoint.hugging_face.component import HuggingFaceExport
from torchtitan.checkpoint.initial import check_initial, load_initial
from torchtitan.checkpoint.loading import Match, find_damage, match_tensors
from torchtitan.checkpoint.manifest import MANIFEST, STATE, DamagedError, Manifest, read_manifest
from torchtitan.checkpoint.matching import is_rank_name, rank_name
from torchtitan.checkpoint.storage import Reads, read_tensors, stage, write_tensors
from torchtitan.config.configurable import Configurable, Problem
from torchtitan.errors import CheckpointError, TorchtitanError
from torchtitan.models.model import Model

log = logging.getLogger(__name__)


class Checkpointer(Configurable):
    """Writes checkpoints that are complete or absent, and reads only those that are what was written.

    All ranks make the same calls in the same order; those marked collective meet there. Whatever fails on one
    rank raises on all of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to save, what to keep, and where to resume from."""

        OPERATIONAL: ClassVar[frozenset[str]] = frozenset(
            {
                "every_n_steps",
                "keep_latest",
                "keep_every_n_steps",
                "async_save",
                "resume",
                "initial_load",
                "export",
                "allow_changes",
                "verify_hashes",
                "timeout_s",
            }
        )

        every_n_steps: int = 500
        """Save after every so many optimizer steps; 0 saves at the end of the run only."""
        keep_latest: int = 2
        """How many of the newest complete checkpoints to keep. With 2, a damaged one can be survived."""
        keep_every_n_steps: int = 0
        """Checkpoints whose step is a multiple of this are never deleted; 0 exempts none."""
        async_save: bool = False
        """Copy the state to CPU memory and write it while training goes on. Needs CPU memory for one copy."""
        resume: str = "latest"
        """Where to start: `latest` (the newest complete checkpoint of this run's folder, if there is one),
        `never`, or the path of a checkpoint folder."""
        initial_load: str = ""
        """Weights that a fresh run starts from: a Hugging Face folder, a model of the hub (`org/name`), a checkpoint or the
        folder of another run; empty for random ones. A run that resumes does not read them."""
        export: HuggingFaceExport.Config | None = None
        """Write a Hugging Face folder at the end of the run; None for none."""
        allow_changes: tuple[str, ...] = ()
        """Dotted paths of settings that may differ from those of the checkpoint although they change what is
        computed, for example `optimizer.lr`."""
        verify_hashes: bool = True
        """Compare every file with its sha256 before resuming. Sizes are always compared."""
        timeout_s: float = TIMEOUT_S
        """Seconds that a rank waits for the others while a checkpoint is written or read. Longer than
        `parallelism.timeout_s`, since one rank may write for minutes when another has done."""

        def check(self) -> Iterator[Problem]:
            """Intervals, counts, and whether a checkpoint named in ``resume`` exists."""
            for name in ("every_n_steps", "keep_every_n_steps"):
                if getattr(self, name) < 0:
                    yield Problem(
                        name,
                        getattr(self, name),
                        "is negative",
                        "set a number of steps, or 0 for none",
                    )
            if self.keep_latest < 1:
                yield Problem(
                    "keep_latest", self.keep_latest, "would keep no checkpoint", "set 1 or more"
                )
            if self.timeout_s <= 0:
                yield Problem(
                    "timeout_s", self.timeout_s, "is not positive", "set seconds such as 1800"
                )
            if (
                self.resume not in ("latest", "never")
                and not (Path(self.resume) / MANIFEST).is_file()
            ):
                yield Problem(
                    "resume",
                    self.resume,
                    f"is no complete checkpoint: it has no {MANIFEST}",
                    "set latest, never, or the path of a step-... folder",
                )

        def check_model(self, model: Model.Config, seq_len: int) -> Iterator[Problem]:
            """Yield what keeps ``model`` from starting with the weights that are named, or from being exported.

            Args:
                model: that is trained.
                seq_len: tokens of its rows.
            """
            if self.initial_load:
                for problem in check_initial(self.initial_load, model, seq_len):
                    yield problem.within("initial_load")
            if self.export:
                for problem in self.export.check_model(model):
                    yield problem.within("export")

        def build(self, *, folder: str | Path) -> "Checkpointer":
            """Make the checkpointer of the run in ``folder``. Collective.

            Raises:
                CheckpointError: if ``folder`` is not writable.
            """
            return Checkpointer(self, Path(folder))

    def __init__(self, config: Config, run_folder: Path) -> None:
        self.config = config
        self.folder = CheckpointFolder.of_run(run_folder)
        self._ranks = Agreement(config.timeout_s)
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[None] | None = None
        self._verified: set[Path] = set()
        self.best_step: int | None = None
        """Step of a checkpoint that is never deleted."""
        self._ranks.each(f"{self.folder.path} is not writable", self.folder.probe)
        self._ranks.first(f"cleaning up {self.folder.path}", self.folder.sweep)

    def due(self, step: int) -> bool:
        """Whether ``every_n_steps`` asks for a checkpoint after ``step``."""
        return self.config.every_n_steps > 0 and step % self.config.every_n_steps == 0

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        rank_tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        read: Reads | None = None,
    ) -> None:
        """Save, or with ``async_save`` copy and begin to save; waits for an earlier save first. Collective.

        Args:
            step: optimizer steps taken.
            tensors: sharded (DTensor) or replicated tensors by name: the same names on all ranks, or on each the
                names of its pipeline stages.
            rank_tensors: tensors of this rank alone (the state of its random generators).
            state: everything else, as JSON; rank 0's is stored.
            read: where tensors on the meta device get their values as they are written; they are saved at once then.

        Raises:
            CheckpointError: if it, or the earlier save, failed on any rank; older checkpoints are untouched.
        """
        self.wait()
        what = f"checkpoint of step {step}"
        rank = self._ranks.rank
        everything = tensors | {rank_name(rank, key): value for key, value in rank_tensors.items()}
        state_json = self._ranks.first(what, lambda: json.dumps(state, indent=1).encode())
        if read is not None or not self.config.async_save:
            self._write(step, everything, state_json, staged=False, read=read)
            return
        copies: dict[str, Tensor] = {}
        self._ranks.each(what, lambda: copies.update(stage(everything)))
        self._pending = self._thread.submit(self._write, step, copies, state_json, staged=True)

    def wait(self) -> None:
        """Finish the pending save, if there is one.

        Raises:
            CheckpointError: if it failed, on any rank.
        """
        if self._pending is not None:
            futures.wait([self._pending])
            finished, self._pending = self._pending, None
            finished.result()

    def close(self) -> None:
        """Finish the pending save and stop the thread; raises like `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def latest(self) -> Path | None:
        """The newest complete checkpoint of this run's folder, not verified."""
        return self.folder.latest()

    def resolve(self, resume: str) -> Path | None:
        """Choose and verify the checkpoint to start from; None means from the beginning. Collective.

        Args:
            resume: as in the config. ``latest`` renames damaged checkpoints to ``.corrupt`` and goes back to the
                one before; a path must be whole.

        Raises:
            CheckpointError: if the named checkpoint is damaged, or all that were complete are.
        """
        self.wait()
        if resume == "never":
            return None
        if resume != "latest":
            self._require_whole(Path(resume))
            return Path(resume)
        while path := self._ranks.first("looking for checkpoints", self.latest):
            damage = self._damage(path)
            if not damage:
                return path
            aside = self._ranks.first(
                f"renaming the damaged {path}",
                lambda path=path: self.folder.set_aside(path, "corrupt"),
            )
            log.error("%s; it is kept as %s, trying the one before", damage, aside.name)
        if corrupt := self._ranks.first("looking for checkpoints", self.folder.corrupt):
            raise CheckpointError(
                f"no usable checkpoint is left in {self.folder.path}: {', '.join(p.name for p in corrupt)}; "
                "restore one from a copy, or delete them or set resume=never to start from the beginning"
            )
        return None

    def read_state(self, path: Path) -> dict[str, Any]:
        """The ``state`` that was saved; its file is always compared with its hash.

        Raises:
            CheckpointError: if ``path`` is no checkpoint, or the file is damaged.
        """
        if damage := read_manifest(path).damage(path, [STATE], verify_hashes=True):
            raise DamagedError(f"{path}: {damage[STATE]}")
        return json.loads((path / STATE).read_bytes())

    def load(self, path: Path, tensors: dict[str, Tensor], rank_tensors: dict[str, Tensor]) -> None:
        """Load a checkpoint into ``tensors`` and ``rank_tensors``, in place. Collective.

        Nothing is changed unless every name, shape and dtype fits and the files are whole. The number of ranks
        and the sharding may differ from those of the run that saved it; a rank tensor that was not saved for
        this rank keeps its value.

        Raises:
            CheckpointError: lists all tensors that do not fit, or names the damaged files.
        """
        self.wait()
        if path not in self._verified:
            self._require_whole(path)
        rank, world_size = self._ranks.rank, self._ranks.world_size
        what = f"loading {path}"
        elsewhere = self._names_everywhere(what, tensors)
        matched: list[Match] = []
        self._ranks.each(
            what,
            lambda: matched.append(
                match_tensors(path, rank, world_size, tensors, rank_tensors, elsewhere)
            ),
        )
        self._ranks.each(what, lambda: read_tensors(path, matched[0].metadata, matched[0].targets))

    def load_initial(self, config: Model.Config, model: Model) -> None:
        """Fill a fresh run's ``model`` with ``initial_load``, if it is set. Collective.

        Raises:
            CheckpointError: if the weights cannot be had, or do not fit.
        """
        if self.config.initial_load:
            load_initial(self.config.initial_load, config, model, self._ranks)

    def export(
        self,
        config: Model.Config,
        model: Model,
        tokenizer: str | None,
        chat_template: str | None = None,
    ) -> None:
        """Write a Hugging Face folder into the run's folder, if ``export`` is set; ``model`` stays as it is. Collective.

        Args:
            config: of the model.
            model: this rank's part of it.
            tokenizer: `Tokenizer.Config.path`.
            chat_template: the text that conversations were written with; None for the tokenizer's own.

        Raises:
            CheckpointError: if it cannot be written, or is not what was to be written.
        """
        if self.config.export is not None:
            exporter = self.config.export.build(folder=self.folder.path.parent)
            initial = self.config.initial_load
            exporter.export(config, model, tokenizer, chat_template, initial, self._ranks)

    def _names_everywhere(self, what: str, tensors: dict[str, Tensor]) -> set[str]:
        """The names of all ranks' tensors; each set of names that several ranks have travels once."""
        digests = self._ranks.each(what, lambda: _digest(tensors))
        mine = digests.index(_digest(tensors)) == self._ranks.rank and len(set(digests)) > 1
        others = self._ranks.each(what, lambda: sorted(tensors) if mine else [])
        return set(tensors).union(*others)

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state_json: bytes,
        *,
        staged: bool,
        read: Reads | None = None,
    ) -> None:
        begin = time.monotonic()
        what = f"checkpoint of step {step}"
        own = sum(
            (self._ranks.world_size if is_rank_name(name) else 1) * tensor.nbytes
            for name, tensor in tensors.items()
        )
        by_names = dict(self._ranks.each(what, lambda: (_digest(tensors), own)))
        n_bytes = len(state_json) + sum(by_names.values())
        temporary = self._ranks.first(what, lambda: self.folder.begin(step, n_bytes))
        try:
            files, infos = write_tensors(self._ranks, temporary, tensors, staged=staged, read=read)
            described = {name: str(info) for name, info in infos.items()}
            manifest = Manifest(step, torch.__version__, self._ranks.world_size, files, described)
            path = self._ranks.first(what, lambda: self._commit(temporary, manifest, state_json))
        except Exception as error:
            if self._ranks.rank == 0:
                with contextlib.suppress(OSError):
                    self.folder.sweep()
            if isinstance(error, TorchtitanError) and not str(error).startswith(what):
                raise type(error)(f"{what}: {error}") from error
            raise
        log.info("saved %s, %.3f GiB in %.1f s", path, n_bytes / 2**30, time.monotonic() - begin)

    def _commit(self, temporary: Path, manifest: Manifest, state_json: bytes) -> Path:
        own = HashedFiles()
        with own.create(temporary / STATE) as file:
            file.write(state_json)
        manifest.files.update(own.records)
        manifest.write(temporary)
        path = self.folder.commit(temporary)
        every = self.config.keep_every_n_steps
        self.folder.prune(
            self.config.keep_latest,
            keep=lambda step: (
                step in (manifest.step, self.best_step) or (every > 0 and step % every == 0)
            ),
        )
        return path

    def _require_whole(self, path: Path) -> None:
        if damage := self._damage(path):
            raise CheckpointError(f"{damage}; restore it from a copy, or resume from another one")

    def _damage(self, path: Path) -> str | None:
        """What is wrong with the checkpoint, naming files and tensors; the ranks share the reading."""
        rank, world_size = self._ranks.rank, self._ranks.world_size

        merged: dict[str, str] = {}
        for found in self._ranks.each(
            f"verifying {path}",
            lambda: find_damage(path, rank, world_size, verify_hashes=self.config.verify_hashes),
        ):
            merged |= found
        if merged:
            return f"the checkpoint {path} is damaged: {'; '.join(merged.values())}"
        self._verified.add(path)
        return None


def _digest(tensors: dict[str, Tensor]) -> str:
    """Equal on ranks with tensors of the same names: all of them, or those of one pipeline stage."""
    names = sorted(name for name in tensors if not is_rank_name(name))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
