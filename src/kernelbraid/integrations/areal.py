"""AReaL's PPO and GRPO on unified operators: one process, synchronous, rollout log-probabilities as they are.

    train = TrainEngine(model, config.actor, optimizer)    # for areal.trainer.ppo.actor.PPOActor
    rollout = InferenceEngine(model)                       # for AReaL's workflows
    train.connect_engine(rollout, None)

AReaL's algorithms are written against two interfaces, `TrainEngine` and `InferenceEngine` of `areal.api`.
Here both are implemented over one transformers model whose memory they share, so that the log-probabilities
which AReaL's loss gets, and those that its workflows record, are bit for bit the same until the weights move.
That is asserted: `logp_abs_diff` of the first minibatch must be exactly 0.

Sources: areal/api/engine_api.py, areal/trainer/ppo/actor.py and areal/workflow/rlvr.py of AReaL 2.0.0, commit
cbff54d
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from areal.api import InferenceEngine as InferenceInterface
    from areal.api import ModelResponse
    from areal.api import TrainEngine as TrainInterface
    from areal.utils.data import (
        concat_batch,
        concat_padded_tensors,
        pack_tensor_dict,
        split_batch,
        split_padded_tensor_dict_into_mb_list,
    )
except ImportError as error:  # pragma: no cover - a test takes the library away in a process of its own
    raise RuntimeError(
        "this needs AReaL, which is not on the package index: install it from its repository, at the commit "
        "in docs/areal.md"
    ) from error

from kernelbraid.models.shared import decoder_of, packed_hidden, refresh
from kernelbraid.models.unify import unify
from kernelbraid.ops.logprob.api import logprob
from kernelbraid.rl.masters import keep_float_masters
from kernelbraid.rl.records import Completion, Finish, Sampling
from kernelbraid.rl.requests import EngineSettings, Request, prompt_seed
from kernelbraid.rl.reuse import Objective
from kernelbraid.rl.rollout import Engine
from kernelbraid.rl.spot_check import MismatchError, unequal

__all__ = ["SETTINGS", "TESTED_AREAL", "InferenceEngine", "TrainEngine", "check"]

TESTED_AREAL = "cbff54d645d2cd8ee1f1c358a82f3f473588433d"
"""Commit of areal-project/AReaL whose interfaces the tests of this file ran against."""
SETTINGS: Mapping[str, object] = {
    "actor.recompute_logprob": False,
    "actor.use_decoupled_loss": False,
    "actor.enable_tree_training": False,
    "actor.is_critic": False,
    "actor.use_lora": False,
    "rollout.max_head_offpolicyness": 0,
    "gconfig.greedy": False,
    "gconfig.top_p": 1.0,
    "gconfig.frequency_penalty": 0.0,
    "gconfig.min_new_tokens": 0,
    "gconfig.use_beam_search": False,
    "gconfig.ignore_eos": False,
}
"""Options of AReaL's PPOConfig and the values under which recorded log-probabilities are the old ones."""
NO_TOP_K = int(1e8)
"""AReaL's value of `top_k` for no limit."""


def check(config: Any) -> None:
    """Raise ValueError, naming the option, unless AReaL's loss divides by the rollout's log-probabilities.

    Args:
        config: a PPOConfig or GRPOConfig of AReaL: `actor`, `rollout` and `gconfig` are read.
    """
    for name, wanted in SETTINGS.items():
        section, option = name.split(".")
        given = getattr(getattr(config, section), option)
        if given != wanted:
            raise ValueError(f"{name} must be {wanted}, got {given!r}")
    if config.gconfig.top_k < NO_TOP_K:
        raise ValueError(
            f"gconfig.top_k must be {NO_TOP_K}, AReaL's value for no limit, got {config.gconfig.top_k}"
        )
    if config.gconfig.temperature != config.actor.temperature:
        raise ValueError(
            f"gconfig.temperature must be actor.temperature, {config.actor.temperature}, got "
            f"{config.gconfig.temperature}"
        )
    Objective(Sampling(temperature=config.gconfig.temperature))


class TrainEngine(TrainInterface):  # type: ignore[misc]
    """AReaL's interface of a trainer over one unified model in one process.

    Args:
        model: a transformers model that `unify` covers; it stays unified.
        config: AReaL's PPOActorConfig, of which temperature, mb_spec and gradient_clipping are read.
        optimizer: over the model's parameters, without state; parameters of 16 bits get float32 masters. None
            for a model that is not trained, such as a reference.
        lr_scheduler: of that optimizer; None for a constant rate.
        require_certificate: as `unify`.

    Raises:
        ValueError: the model or an option is not covered.
        RuntimeError: a certificate is required and missing.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        *,
        require_certificate: bool = False,
    ) -> None:
        unify(model, require_certificate=require_certificate).require()
        self.model, self.config = model, config
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        if optimizer is not None:
            keep_float_masters(optimizer)
        self.rollout_engine: InferenceEngine | None = None
        self.checked_tokens = 0
        """Tokens whose log-probability was compared with the rollout's, bit by bit, and found equal."""
        self._version = self._steps = 0

    # ---- One process ----

    def create_process_group(self, parallel_strategy: Any = None) -> None:
        """Nothing: there is one process.

        Raises:
            ValueError: more are asked for.
        """
        if parallel_strategy is not None and getattr(parallel_strategy, "world_size", 1) != 1:
            raise ValueError(f"parallel_strategy must be of one process, got {parallel_strategy}")

    def initialize(self, *given: Any, **options: Any) -> None:
        """Nothing: the model was given."""

    @property
    def initialized(self) -> bool:
        return True

    @property
    def data_parallel_group(self) -> Any:
        return None

    @property
    def data_parallel_rank(self) -> int:
        return 0

    @property
    def data_parallel_world_size(self) -> int:
        return 1

    def current_data_parallel_head(self) -> int:
        return 0

    def is_data_parallel_head(self) -> bool:
        return True

    @property
    def context_and_model_parallel_group(self) -> Any:
        return None

    @property
    def cpu_group(self) -> Any:
        return None

    def onload(self) -> None:
        """Nothing: weights stay where they are."""

    def offload(self) -> None:
        raise NotImplementedError("enable_offload must be false: rollout and update share the weights")

    def get_device_stats(self) -> Any:
        from areal.api.io_struct import DeviceRuntimeInfo

        return DeviceRuntimeInfo.get_current()

    def export_stats(self) -> dict[str, float]:
        from areal.utils import stats_tracker

        found: dict[str, float] = stats_tracker.export_all()
        return found

    # ---- Rollout and weights ----

    def connect_engine(self, engine: Any, meta: Any) -> None:
        """Take the rollout engine over this model's memory.

        Raises:
            ValueError: it is another engine, whose bits are not this model's.
        """
        if not isinstance(engine, InferenceEngine) or engine.model is not self.model:
            raise ValueError("engine must be an InferenceEngine of kernelbraid over the same model")
        self.rollout_engine = engine

    def update_weights(self, meta: Any) -> None:
        """Let the connected engine draw from the weights as they are: a copy only where memory is not shared.

        Args:
            meta: AReaL's WeightUpdateMeta with a version, or None for the next one.
        """
        version = getattr(meta, "version", None)
        self._connected().refresh(self._version + 1 if version is None else version)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: Any, **options: Any) -> Any:
        """As `InferenceEngine.rollout_batch`."""
        return self._connected().rollout_batch(data, workflow, **options)

    def prepare_batch(self, *given: Any, **options: Any) -> Any:
        raise NotImplementedError("rollout must be synchronous: call rollout_batch")

    def set_version(self, version: int) -> None:
        """Name the weights as they are; AReaL counts them by global step."""
        self._version, self._steps = version, 0

    def get_version(self) -> int:
        return self._version

    def _connected(self) -> "InferenceEngine":
        if self.rollout_engine is None:
            raise RuntimeError("no rollout engine: call connect_engine first")
        return self.rollout_engine

    def save(self, meta: Any) -> None:
        """Write the model in Hugging Face's format.

        Raises:
            ValueError: another format is asked for, or the optimizer's state.
        """
        if meta.weight_format != "hf" or meta.with_optim:
            raise ValueError("weight_format must be 'hf' without the optimizer's state")
        self.model.save_pretrained(Path(meta.path))
        for each in (meta.tokenizer, meta.processor):
            if each is not None:
                each.save_pretrained(Path(meta.path))

    def load(self, meta: Any) -> None:
        raise NotImplementedError("load the model before the engine is made")

    # ---- Update ----

    def train(self, mode: bool = True) -> Any:
        self.model.train(mode)
        return self

    def optimizer_zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def optimizer_step(self) -> dict[str, float]:
        """Clip and step; a gradient that is not finite leaves the weights as they are."""
        if self.optimizer is None:
            raise RuntimeError("this engine has no optimizer: pass one to TrainEngine")
        most = self.config.optimizer.gradient_clipping
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, foreach=False)
        finite = math.isfinite(float(norm))
        if finite:
            self.optimizer.step()
            self._steps += 1
        self.optimizer_zero_grad()
        rate = float(self.optimizer.param_groups[0]["lr"])
        return {"update_successful": float(finite), "grad_norm": float(norm), "lr": rate}

    def lr_scheduler_step(self) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def train_batch(
        self,
        input_: list[dict[str, Any]] | dict[str, Any],
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Tensor],
    ) -> dict[str, float]:
        """One optimizer step by AReaL's loss over log-probabilities and entropies of the unified model.

        Raises:
            MismatchError: before the first step on a version of the weights, a token's log-probability
                differs in bits from the rollout's: `logp_abs_diff` is not 0.
            RuntimeError: tokens were drawn under another version of the weights than the present one.
        """
        self.optimizer_zero_grad()
        parts = self._parts(input_)
        weights = [loss_weight_fn(part) for part in parts]
        total = torch.stack([torch.as_tensor(each) for each in weights]).sum()
        for part, weight in zip(parts, weights, strict=True):
            if weight == 0:
                continue
            scored, entropies = self._scored(part)
            self._compare(scored.detach(), part)
            loss = loss_fn(scored, entropies, part)
            torch.autograd.backward(loss * (weight / total))
        return {**self.optimizer_step(), "num_micro_batches": len(parts)}

    @torch.no_grad()
    def eval_batch(
        self,
        input_: list[dict[str, Any]] | dict[str, Any],
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Tensor],
    ) -> Tensor:
        """The loss without a step."""
        parts = self._parts(input_)
        weights = torch.stack([torch.as_tensor(loss_weight_fn(part)) for part in parts])
        losses = torch.stack([loss_fn(*self._scored(part), part) for part in parts])
        return (losses * weights).sum() / weights.sum()

    @torch.no_grad()
    def forward_batch(
        self,
        input_: list[dict[str, Any]] | dict[str, Any],
        output_seqlens: list[int] | None = None,
        aggregate_fn: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Any:
        """Log-probabilities [B, S] of the token after each, 0 after the last; for a list, those of each item.

        Rows are padded as they came, so output_seqlens and aggregate_fn have nothing to do.
        """
        batch, meta = concat_batch(input_) if isinstance(input_, list) else (input_, None)
        found = torch.zeros(batch["input_ids"].shape, device=batch["input_ids"].device)
        for row, mask in enumerate(batch["attention_mask"].bool()):
            held = pack_tensor_dict(
                {"input_ids": batch["input_ids"][row][None], "attention_mask": mask[None]}
            )
            found[row, mask] = self._scored(held)[0]
        return found if meta is None else split_batch(found, meta)

    def forward_backward_batch(
        self, mb_list: Any, process_output_fn: Callable[..., Any], forward_only: bool = False
    ) -> None:
        raise NotImplementedError("logits are never in memory: call train_batch, eval_batch or forward_batch")

    def _parts(self, input_: list[dict[str, Any]] | dict[str, Any]) -> list[dict[str, Any]]:
        """Packed micro-batches, as AReaL cuts them."""
        batch = concat_batch(input_)[0] if isinstance(input_, list) else dict(input_)
        device = next(self.model.parameters()).device
        cut = split_padded_tensor_dict_into_mb_list(batch, self.config.mb_spec)
        return [
            {
                name: value.to(device) if isinstance(value, Tensor) else value
                for name, value in pack_tensor_dict(part).items()
            }
            for part in cut.mbs
        ]

    def _scored(self, part: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Log-probability of the token after each of a packed part, and the entropy there."""
        ids, offsets = part["input_ids"], part["cu_seqlens"]
        after = torch.roll(ids, -1)
        after[offsets[1:].long() - 1] = -100
        hidden = packed_hidden(self.model, ids, offsets, max_seqlen=int(part["max_seqlen"]))
        found = logprob(
            hidden, self.model.lm_head.weight, after, temperature=self.config.temperature, return_entropy=True
        )
        scored, entropies = found
        return scored, entropies

    def _compare(self, scored: Tensor, part: Mapping[str, Any]) -> None:
        """Refuse stale tokens; before the first step on a version, refuse other bits than the rollout's."""
        versions = part.get("versions")
        if versions is None or "logprobs" not in part:
            return
        drawn = sorted(set(versions[versions >= 0].tolist()))
        if drawn and drawn != [self._version]:
            raise RuntimeError(
                f"tokens were drawn under versions {drawn} of the weights, which are at {self._version}: set "
                "rollout.max_head_offpolicyness=0, or recompute with AReaL's own engines"
            )
        if self._steps:
            return
        mask = part["loss_mask"].bool()
        one, other = scored[mask], part["logprobs"][mask]
        places = unequal(one, other.to(torch.float32))
        if len(places):
            gap, place = float((one - other).abs().max()), int(places[0])
            raise MismatchError(
                f"logp_abs_diff must be 0 in the first minibatch, and is up to {gap:.3g}: {len(places)} of "
                f"{len(one)} log-probabilities differ in bits from the rollout's, first "
                f"{float(one[place])!r} against {float(other[place])!r}"
            )
        self.checked_tokens += len(one)


class InferenceEngine(InferenceInterface):  # type: ignore[misc]
    """AReaL's interface of a rollout engine over a unified model in this process.

    Requests that workflows await at the same time are drawn together.

    Args:
        model: the model of a TrainEngine, whose memory is read.
        settings: limits of the engine.

    Raises:
        ValueError: a module of the model is not unified.
    """

    def __init__(self, model: Any, settings: EngineSettings | None = None) -> None:
        self.model = model
        self.decoder = decoder_of(model)
        self.settings = settings or EngineSettings()
        self.engine = Engine(self.decoder, self.settings)
        self._waiting: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self._asked = 0
        self._stepping: asyncio.Task[None] | None = None

    def initialize(self, *given: Any, **options: Any) -> None:
        """Nothing: the model was given."""

    def destroy(self) -> None:
        """Nothing: memory is the model's."""

    @property
    def initialized(self) -> bool:
        return True

    def set_version(self, version: int) -> None:
        """Name the weights as they are: what AReaL's trainer calls after `update_weights`."""
        if version != self.engine.version:
            self.refresh(version)

    def get_version(self) -> int:
        return self.engine.version

    def refresh(self, version: int) -> None:
        """Draw from the model's weights as they are from now on.

        Raises:
            ValueError: the version does not rise.
        """
        refresh(self.decoder, self.model, version)
        self.engine.update_weights(self.decoder.weights, version)

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    async def agenerate(self, req: Any) -> Any:
        """Draw one completion.

        Args:
            req: AReaL's ModelRequest.

        Returns:
            AReaL's ModelResponse: each token with its log-probability under the whole distribution at the
            temperature, and the version of the weights that drew it.

        Raises:
            ValueError: a parameter would draw from another distribution than AReaL's loss names, or the
                request does not fit.
        """
        sampling, given = sampling_of(req), req.gconfig.seed
        seed = prompt_seed(self.settings.seed, self._asked) if given is None else given
        request = Request(torch.tensor(req.input_ids, dtype=torch.int32), sampling, self._asked, seed=seed)
        loop = asyncio.get_running_loop()
        self.engine.submit([request])
        self._waiting[request.name] = loop.create_future()
        self._asked += 1
        if self._stepping is None or self._stepping.done():
            self._stepping = loop.create_task(self._step())
        found = await self._waiting[request.name]
        assert found.logprobs is not None
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=found.tokens.tolist(),
            output_logprobs=found.logprobs.tolist(),
            output_versions=[found.snapshot.version] * len(found.tokens),
            stop_reason=_REASONS[found.finish],
            tokenizer=req.tokenizer,
            processor=req.processor,
        )

    async def _step(self) -> None:
        """Step until all are drawn; between steps others may ask."""
        try:
            while self.engine.unfinished:
                await asyncio.sleep(0)
                for each in self.engine.step():
                    self._waiting.pop((each.prompt_index, each.sample_index)).set_result(each)
        except BaseException as error:
            for future in self._waiting.values():
                future.set_exception(error)
            self._waiting.clear()

    def rollout_batch(
        self,
        data: list[dict[str, Any]],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Run a workflow on every item, `group_size` times, and wait for all.

        Args:
            data: items.
            workflow: a RolloutWorkflow, or its class.
            workflow_kwargs: of the class.
            group_size: episodes of an item; they come as one dict.

        Returns:
            For each item the tensors of its episodes, padded [group_size, S].

        Raises:
            ValueError: an option is set that is not covered.
        """
        asked = [name for name, value in options.items() if value]
        if asked:
            raise ValueError(f"{', '.join(asked)} must be left out: not covered")
        made = workflow(**(workflow_kwargs or {})) if isinstance(workflow, type) else workflow

        async def every() -> list[list[dict[str, Any]]]:
            groups = (
                asyncio.gather(*(made.arun_episode(self, item) for _ in range(group_size))) for item in data
            )
            return list(await asyncio.gather(*groups))

        return [concat_padded_tensors(group) for group in asyncio.run(every())]


_REASONS = {
    Finish.END: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORTED: "abort",
}


def sampling_of(req: Any) -> Sampling:
    """How a request of AReaL draws, if from the whole distribution at its temperature.

    Raises:
        ValueError: it does not, or it asks for what is not covered; the message names the option.
    """
    given = req.gconfig
    for name, wanted in SETTINGS.items():
        section, option = name.split(".")
        if section == "gconfig" and getattr(given, option) != wanted:
            raise ValueError(f"gconfig.{option} must be {wanted}, got {getattr(given, option)!r}")
    if given.top_k < NO_TOP_K:
        raise ValueError(f"gconfig.top_k must be {NO_TOP_K}, got {given.top_k}")
    if given.n_samples != 1 or given.stop or req.image_data:
        raise ValueError("a request must have n_samples=1, no stop strings and no images")
    room = given.max_tokens - len(req.input_ids)
    if room < 1:
        raise ValueError(
            f"gconfig.max_tokens {given.max_tokens} leaves no room behind {len(req.input_ids)} tokens"
        )
    return Sampling(
        temperature=given.temperature,
        max_tokens=min(given.max_new_tokens, room),
        stop_tokens=tuple(token for token in given.stop_token_ids if token is not None),
    )
