"""The training loop: draw, score, resolve old log-probabilities, update, and again.

A run is a function of its configuration: prompts come in an order that the seed decides, each token from
(seed, prompt, sample, position), minibatches from (seed, rollout, epoch). Nothing reads a clock or a global
random number but the measurements that a row tells. So a resumed run has the bits of one that was never
interrupted, and with unified operators the arms `reuse` and `recompute` have the same.
"""

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kernelbraid.rl.arithmetic import snapshot_of
from kernelbraid.rl.checkpoint import Checkpoints
from kernelbraid.rl.config import Config, Old, make_task, read_config
from kernelbraid.rl.parallel import Group
from kernelbraid.rl.phases import Clock, Scored, prepare, rollout, score
from kernelbraid.rl.policy import Policy, frozen
from kernelbraid.rl.progress import Log, Told, memory
from kernelbraid.rl.recording import Calls, check_place
from kernelbraid.rl.records import RolloutBatch, Snapshot
from kernelbraid.rl.requests import EngineSettings
from kernelbraid.rl.reuse import Mode
from kernelbraid.rl.rollout import Engine
from kernelbraid.rl.sources import LAST, export, read_source
from kernelbraid.rl.spot_check import Counters, OldLogprobs, SpotCheck
from kernelbraid.rl.tasks.chat import Encoder
from kernelbraid.rl.tasks.feed import Feed
from kernelbraid.rl.update import Step, Updater

FREE = ("rollouts", "checkpoints", "logging")
"""Parts of a configuration that may change between an interrupted run and the one that goes on."""


class Trainer:
    """A run, ready to go on where its last checkpoint stands. Use it as a context manager.

    Args:
        config: what is trained, and how.
        folder: what paths of the configuration are relative to.
        resume: go on from the newest checkpoint; False refuses a folder that has one.

    Raises:
        ValueError: something is wrong with the configuration, the model, the task or a checkpoint; nothing
            was drawn or trained yet.
        RuntimeError: a folder cannot be written, or another process trains in it.
        ModuleNotFoundError: an extra that is needed is not installed.
    """

    def __init__(self, config: Config, folder: str | Path = ".", *, resume: bool = True) -> None:
        self.config, self.folder = config, Path(folder)
        if config.model.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("model.device: there is no CUDA device here, use cpu with dtype float32")
        self.task = make_task(config.task, self.folder)
        self.group = Group(config.model.device)
        if config.rollout.prompts < self.group.world:
            raise ValueError(f"rollout.prompts: must be at least the {self.group.world} processes")
        self.source = read_source(config, self.folder)
        self.encoder = Encoder(self.source.tokenizer, config.task.template, system=config.task.system)
        section = config.task
        self.feed = Feed(
            self.task,
            self.encoder,
            seed=config.seed,
            limit=section.max_prompt_tokens,
            on_long=section.on_long,
            shuffle=section.shuffle,
        )
        self.policy = self._policy()
        self.reference = None
        if config.kl.weight:
            self.reference = frozen(self.policy.decoder)
        group = self.group
        self.updater = Updater(
            self.policy,
            config,
            reduce=group.add if group.world > 1 and config.parallel == "replicated" else None,
            total=group.total if group.world > 1 else None,
            share=group.share,
        )
        mode = Mode.NEVER if config.reuse.old == Old.RECOMPUTE else config.reuse.mode
        self.old = OldLogprobs(config.objective, mode, config.reuse.spot_check)
        self.run_name = group.gather([uuid.uuid4().hex])[0]
        self.bits = snapshot_of(self.policy.decoder, version=0, run=self.run_name).bits_id
        self.done = 0
        """Rollouts, each with its update."""
        self.rewards: list[float | None] = []
        self.tokens = 0
        self.clock = Clock()
        self.calls: Calls | None = None
        self.initial = self.policy.digest()
        self.checkpoints: Checkpoints | None = None
        self._resume(resume)

    def _policy(self) -> Policy:
        config = self.config
        options: dict[str, Any] = {
            "value": config.algorithm == "ppo",
            "checkpoint": config.update.checkpoint_activations,
            "masters": config.update.masters,
        }
        if config.parallel == "fsdp2":
            from kernelbraid.rl.sharded import ShardedPolicy

            return ShardedPolicy(self.source.decoder, config.model.kernels, group=self.group, **options)
        return Policy(self.source.decoder, config.model.kernels, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()
        self.group.close()

    @property
    def snapshot(self) -> Snapshot:
        """The policy as it is now."""
        return snapshot_of(self.policy.decoder, version=self.updater.steps, run=self.run_name)

    @cached_property
    def engine(self) -> Engine:
        """What draws completions, on the parameters that are trained."""
        section, policy = self.config.rollout, self.policy
        value = policy.value
        return Engine(
            policy.decoder,
            EngineSettings(
                cache_tokens=section.cache_tokens * min(section.concurrent, section.completions),
                max_sequences=section.concurrent,
                step_tokens=max(section.step_tokens, section.concurrent),
                record=section.record,
                end_tokens=() if section.ignore_end else self.source.ends,
                seed=self.config.seed,
                graphs=None if self.calls is None else False,  # a graph's calls would not be counted
            ),
            run=self.run_name,
            version=self.updater.steps,
            decode=self.encoder.decode,
            value_head=None if value is None else partial(value, operators=policy.operators),
        )

    def run(self, told: Told | None = None) -> dict[str, Any]:
        """Train to the configured number of rollouts, and leave a checkpoint and the model.

        Args:
            told: gets every row.

        Returns:
            The summary that `kernelbraid train --json` prints.

        Raises:
            ReuseError, MismatchError: reuse was demanded and is not valid, or bits that must agree differ.
            MemoryError: there is not enough; the message says what to lower.
            FloatingPointError: a loss or a gradient is not finite.
        """
        log = None
        if self.group.first:
            section = self.config.logging
            log = Log(
                self.folder / section.folder,
                done=self.done,
                every=section.every,
                tensorboard=section.tensorboard,
            )
        try:
            while self.done < self.config.rollouts:
                row = self._step()
                if log is not None:
                    log.write(row)
                if told is not None and self.group.first:
                    told(row)
                every = self.config.checkpoints.every
                if self.done == self.config.rollouts or (every and self.done % every == 0):
                    self._save()
        finally:
            if log is not None:
                log.close()
        if self.group.first:
            target = self.folder / self.config.checkpoints.folder / LAST
            export(self.policy.decoder, self.config, self.folder, target)
        return self.summary()

    def record(self) -> Calls:
        """Count the calls of attention and linear from now on, which changes no bits; returns the counts.

        Raises:
            RuntimeError: a rollout was drawn already: the engine's calls would not be counted.
        """
        if self.calls is None:
            if "engine" in vars(self):
                raise RuntimeError("record calls before the first rollout is drawn")
            self.calls = Calls()
            self.policy.record(self.calls)
        return self.calls

    def step(self) -> dict[str, Any]:
        """One rollout and its update; returns its row."""
        return self._step()

    def switch(self, old: Old, *, check: SpotCheck | None = None, max_tokens: int | None = None) -> None:
        """Take old log-probabilities from elsewhere from the next step on: for measurements.

        Args:
            old: from where.
            check: how much is tested, where they are reused; the configuration's by default.
            max_tokens: of a completion; the present number by default.
        """
        reuse = self.config.reuse
        changed: dict[str, Any] = {
            "reuse": reuse.model_copy(update={"old": old, "spot_check": check or reuse.spot_check})
        }
        if max_tokens is not None:
            changed["sampling"] = replace(self.config.sampling, max_tokens=max_tokens)
        self.config = self.updater.config = self.config.model_copy(update=changed)
        mode = Mode.NEVER if old == Old.RECOMPUTE else reuse.mode
        counters = self.old.counters
        self.old = OldLogprobs(self.config.objective, mode, self.config.reuse.spot_check)
        self.old.counters = counters

    def summary(self) -> dict[str, Any]:
        """What happened, as JSON can hold it."""
        counters, seconds = self.old.counters, self.clock.seconds
        known = [each for each in self.rewards if each is not None]
        return {
            "steps": self.done,
            "optimizer_steps": self.updater.steps,
            "reward_first": known[0] if known else None,
            "reward_last": known[-1] if known else None,
            "tokens": self.tokens,
            "logprob_mismatch_max": _number(counters.logprob_mismatch_max),
            "reused_batches": counters.reused_batches,
            "recomputed_batches": dict(sorted(counters.recomputed_for.items())),
            "checked_tokens": counters.checked_tokens,
            "unequal_tokens": counters.unequal_tokens,
            "phase_seconds": {name: round(value, 6) for name, value in seconds.items()},
            "tokens_per_second": self.clock.speeds(),
            "weights": self.policy.digest(),
        }

    def _step(self) -> dict[str, Any]:
        try:
            return self._rollout_and_update()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(
                    f"out of memory in rollout {self.done}: lower update.micro_batch_tokens, "
                    "rollout.prompts or rollout.group_size, or set update.checkpoint_activations; the last "
                    "checkpoint is whole"
                ) from error
            raise

    def _rollout_and_update(self) -> dict[str, Any]:
        clock = Clock()
        state = self.feed.state()
        try:
            with clock.phase("rollout"):
                batch, prompts = rollout(self, self.done)
            clock.tokens["rollout"] = sum(len(each.tokens) for each in batch.completions)
            with clock.phase("reward"):
                scored = score(self, batch, prompts)
            with clock.phase("old"):
                prepared = prepare(self, batch, scored)
            with clock.phase("update"):
                steps = self.updater.run(prepared)
            self.engine.update_weights(self.policy.decoder.weights, self.updater.steps)
            epochs = self.config.update.epochs
            clock.tokens["update"] = epochs * sum(
                len(each.prompt) + len(each.tokens) for each in batch.completions
            )
        except BaseException:
            self.feed.restore(state)
            raise
        if self.calls is not None:
            self.calls.steps += 1
        self.clock.add(clock)
        self.tokens += clock.tokens["rollout"]
        self.rewards.append(scored.mean)
        row = self._row(batch, scored, steps, clock)
        self.done += 1
        return row

    def _row(self, batch: RolloutBatch, scored: Scored, steps: list[Step], clock: Clock) -> dict[str, Any]:
        counters, count = self.old.counters, len(batch)
        lengths = [len(each.tokens) for each in batch.completions]
        shown = batch.completions[: self.config.logging.completions]
        return {
            "rollout": self.done,
            "optimizer_steps": self.updater.steps,
            "reward": scored.mean,
            "loss": [each.loss for each in steps],
            "grad_norm": [each.grad_norm for each in steps],
            "clipped": sum(each.clipped for each in steps) / max(1, sum(each.tokens for each in steps)),
            "largest_log_ratio": max(each.largest_log_ratio for each in steps),
            "tokens": sum(lengths),
            "mean_length": sum(lengths) / count,
            "truncated": sum(each.truncated for each in batch.completions) / count,
            "reused_batches": counters.reused_batches,
            "recomputed_batches": counters.recomputed_batches,
            "recomputed_for": dict(sorted(counters.recomputed_for.items())),
            "logprob_mismatch_max": _number(counters.logprob_mismatch_max),
            "phase_seconds": {name: round(value, 6) for name, value in clock.seconds.items()},
            "tokens_per_second": clock.speeds(),
            "memory_bytes": memory(self.policy.device),
            "completions": [self.encoder.decode(each.tokens.tolist()) for each in shown],
        }

    # ---- Checkpoints ----

    def _resume(self, resume: bool) -> None:
        section = self.config.checkpoints
        found = None
        if self.group.first:
            self.checkpoints = Checkpoints(self.folder / section.folder, section.keep)
            try:
                if not resume and self.checkpoints.numbers():
                    raise ValueError(f"{self.checkpoints.folder} holds checkpoints: resume, or name another")
                found = self.checkpoints.load()
            except BaseException:
                self.checkpoints.close()
                raise
        found = self.group.gather([found])[0]
        if found is not None:
            try:
                self._restore(found[1])
            except BaseException:
                if self.checkpoints is not None:
                    self.checkpoints.close()
                raise

    def _save(self) -> None:
        masters = {name: self.policy.whole(name, each.detach()) for name, each in self.policy.masters.items()}
        optimizer = self.updater.state()
        if self.checkpoints is None:
            return
        self.checkpoints.save(
            self.done,
            {
                "config": self._fixed(),
                "bits": self.bits,
                "initial": self.initial,
                "masters": masters,
                "optimizer": optimizer,
                "steps": self.updater.steps,
                "done": self.done,
                "feed": self.feed.state(),
                "rewards": self.rewards,
                "tokens": self.tokens,
                "counters": self.old.counters.document(),
                "seconds": dict(self.clock.seconds),
                "counted": dict(self.clock.tokens),
            },
        )

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stands.

        Raises:
            ValueError: it is of another configuration, model, task or arithmetic; the message names what.
        """
        for name, mine in self._fixed().items():
            theirs = state["config"].get(name)
            if theirs != mine:
                raise ValueError(f"the checkpoint is of another run: {name} was {theirs!r} and is {mine!r}")
        for name, mine in (("bits", self.bits), ("initial", self.initial)):
            if state[name] != mine:
                what = "operators compute other bits" if name == "bits" else "the model's weights are others"
                raise ValueError(f"the checkpoint is of another run: {what} than where it began")
        if int(state["done"]) > self.config.rollouts:
            raise ValueError(f"rollouts: the checkpoint has {state['done']} already")
        self.feed.restore(state["feed"])
        with torch.no_grad():
            for name, each in self.policy.masters.items():
                each.copy_(self.policy.part(name, state["masters"][name]))
        self.policy.publish()
        self.updater.load(state["optimizer"])
        self.updater.steps, self.done = int(state["steps"]), int(state["done"])
        self.rewards, self.tokens = list(state["rewards"]), int(state["tokens"])
        counters = dict(state["counters"])
        self.old.counters = Counters(**{**counters, "recomputed_for": Counter(counters["recomputed_for"])})
        self.clock.seconds.update(state["seconds"])
        self.clock.tokens.update(state["counted"])

    def _fixed(self) -> dict[str, Any]:
        """What a run must share with the one that it goes on from: settings by path, and the processes."""
        config = self.config.model_dump(mode="json", exclude=set(FREE))
        config["processes"] = self.group.world
        if self.config.model.kernels == "unified":
            for name in ("micro_batch_tokens", "checkpoint_activations"):
                del config["update"][name]  # they change no bit
        return _by_path(config)


def _by_path(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found |= _by_path(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _number(value: float) -> float | None:
    """None for what JSON cannot hold."""
    return value if value < float("inf") else None


def train(
    config: Config | str | Path,
    *,
    folder: str | Path | None = None,
    resume: bool = True,
    rollouts: int | None = None,
    told: Told | None = None,
    workloads: str | Path | None = None,
) -> dict[str, Any]:
    """Train a model with GRPO or PPO.

    Args:
        config: a configuration, or the path of its YAML file.
        folder: what its paths are relative to; by default that of the file, or the working directory.
        resume: go on from the newest checkpoint; False refuses a folder that has one.
        rollouts: replaces the configured number.
        told: gets a row after each rollout.
        workloads: file that the calls of attention and linear layers are written to; see `recording`.

    Returns:
        The summary: rewards, tokens, how many batches were reused, seconds by phase.

    Raises:
        ValueError: before anything is drawn, where the configuration, model or task is wrong.
        ReuseError, MismatchError, MemoryError, FloatingPointError: as `Trainer.run`.
    """
    if not isinstance(config, Config):
        folder = Path(config).parent if folder is None else folder
        config = read_config(config)
    if rollouts is not None:
        if rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, got {rollouts}")
        config = config.model_copy(update={"rollouts": rollouts})
    if workloads is not None:
        check_place(workloads)
    with Trainer(config, folder or ".", resume=resume) as trainer:
        calls = None if workloads is None else trainer.record()
        summary = trainer.run(told)
        if calls is not None and workloads is not None and trainer.group.first:
            calls.write(workloads)
        return summary
