"""TRL's GRPO on unified operators: our rollouts, whose log-probabilities stand for every recomputation.

    from kernelbraid.integrations.trl import GRPOTrainer    # in the place of trl's

The policy is unified as a whole; completions come from `rl.rollout.Engine` through TRL's `rollout_func`; the
loss divides by the log-probabilities that the engine recorded. Where TRL asks the policy for them once more,
without gradients, the record answers and no forward is made. Until the first optimizer step after a rollout
every ratio must be exactly 1: the forward that has gradients is compared with the record, bit by bit.

Only public names of TRL are used: the constructor, `compute_loss`, `create_optimizer` and `log` are
overridden, and `forward` of the model, which TRL replaces as well, is set.

Source: trl/trainer/grpo_trainer.py of TRL 1.16.0
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MethodType
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

try:
    import trl
    from transformers.utils.generic import ModelOutput
except ImportError as error:  # pragma: no cover - a test takes the library away in a process of its own
    raise RuntimeError("training with TRL needs the extra `trl`: pip install 'kernelbraid[trl]'") from error

from kernelbraid.models.padded import padded_logprobs
from kernelbraid.models.shared import decoder_of, refresh
from kernelbraid.models.unify import report, unify
from kernelbraid.rl.masters import keep_float_masters
from kernelbraid.rl.records import Completion, Sampling
from kernelbraid.rl.requests import EngineSettings, Request, prompt_seed
from kernelbraid.rl.reuse import Mode, Objective
from kernelbraid.rl.rollout import Engine
from kernelbraid.rl.spot_check import MismatchError, OldLogprobs, Recomputed, SpotCheck, unequal

__all__ = ["TESTED_TRL", "GRPOTrainer", "Rollout", "Scored", "refuse"]

TESTED_TRL = ("1.16.0",)
"""Versions that the tests of this file passed with."""
MOST_CACHED = 131072
"""Tokens that the cache has room for, unless `engine` says otherwise."""
MOST_PACKED = 16384
"""Tokens of a pass that recomputes."""

DRAWN = (
    "TRL's loss names log-probabilities of the whole distribution, and tokens would be drawn from another one"
)
OTHER_ENGINE = "rollouts are those of KernelBraid's engine"
SHARDED = "one process with whole parameters is covered"
REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("top_p", (1.0,), DRAWN),
    ("top_k", (0, None), DRAWN),
    ("min_p", (None, 0.0), DRAWN),
    ("repetition_penalty", (1.0,), DRAWN),
    ("generation_kwargs", (None, {}), DRAWN),
    ("cache_implementation", (None,), OTHER_ENGINE),
    ("use_vllm", (False,), OTHER_ENGINE),
    ("use_transformers_continuous_batching", (False,), OTHER_ENGINE),
    ("cast_lm_head_to_fp32", (False,), "the head computes as contract `logprob` says"),
    ("use_liger_kernel", (False,), "the policy's kernels are the unified ones"),
    ("torch_compile", (False,), "the model's forward is not compiled"),
    ("fp16", (False,), "its scaled losses are not covered: load the model in bfloat16 or float32"),
    ("deepspeed", (None,), SHARDED),
    ("parallelism_config", (None,), SHARDED),
    ("world_size", (1,), SHARDED),
)
"""Options of GRPOConfig: what they may be, and why nothing else."""
ANSWERED = ("tools", "environment_factory", "rollout_func", "peft_config", "quantization_config")
"""Arguments of TRL's constructor that must be left out."""


def refuse(args: Any) -> None:
    """Raise ValueError, naming the option, where reuse of rollout log-probabilities would be wrong.

    Args:
        args: a GRPOConfig.
    """
    for name, allowed, why in REFUSED:
        given = getattr(args, name)
        if given not in allowed:
            raise ValueError(f"{name} must be {allowed[0]}, got {given!r}: {why}")
    if args.fsdp:
        raise ValueError(f"fsdp must be empty, got {args.fsdp!r}: {SHARDED}")
    Objective(Sampling(temperature=args.temperature))


@dataclass
class Scored(ModelOutput):
    """What TRL reads of a call with `fused_lm_head=True`."""

    log_probs: Tensor | None = None
    """float32 [B, S - 1], 0 where no label counts."""
    entropy: Tensor | None = None
    """As `log_probs`; None where the record answered, which holds none."""


class Weights(NamedTuple):
    """Which weights a number came from, as far as one process can tell without reading them."""

    step: int
    """TRL's count of optimizer steps."""
    writes: tuple[tuple[int, int], ...]
    """Place in memory, and torch's count of writes in place, of each parameter. Writes through `.data` are
    not counted."""

    @classmethod
    def of(cls, model: Any, step: int) -> "Weights":
        return cls(step, tuple((each.data_ptr(), each._version) for each in model.parameters()))


@dataclass(slots=True)
class Record:
    """The last rollout, by the tokens of its rows."""

    weights: Weights
    number: int
    rows: dict[bytes, Tensor] = field(default_factory=dict)
    """Prompt and completion as int64 bytes; float32 log-probabilities of the completion's tokens."""

    def answer(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor | None:
        """Log-probabilities [B, S - 1] of labels that are recorded completions; None if one is not."""
        ids, real, wanted = input_ids.cpu(), attention_mask.bool().cpu(), labels[:, 1:].cpu() != -100
        found = torch.zeros(wanted.shape)
        for row in range(len(ids)):
            if not wanted[row].any():
                continue
            held = self.rows.get(_key(ids[row][real[row]]))
            if held is None or len(held) != int(wanted[row].sum()):
                return None
            found[row][wanted[row]] = held
        return found.to(input_ids.device)


def _key(tokens: Tensor) -> bytes:
    return tokens.to(torch.int64).numpy().tobytes()


class Rollout:
    """The `rollout_func` of a GRPOTrainer: draws completions and resolves their old log-probabilities.

    Args:
        model: a transformers model, unified as a whole, whose own forward is its class's.
        args: TRL's configuration.
        ends: token ids that end a completion.
        engine: limits of the engine; made to fit the first rollout by default.
        mode: `require` or `auto` to reuse, `never` to recompute every rollout's log-probabilities.
        check: completions of each rollout that are recomputed and compared before they are reused.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        ends: Sequence[int],
        *,
        engine: EngineSettings | None = None,
        mode: Mode | str = Mode.REQUIRE,
        check: SpotCheck | None = None,
    ) -> None:
        self.model, self.settings, self.seed = model, engine, args.seed
        self.sampling = Sampling(
            temperature=args.temperature, max_tokens=args.max_completion_length, stop_tokens=tuple(ends)
        )
        self.decoder = decoder_of(model)
        self.old = OldLogprobs(Objective(self.sampling), mode, check)
        self.engine: Engine | None = None
        self.record: Record | None = None
        self.answered = 0
        """Calls without gradients that the record answered in the place of a forward."""
        self._number = 0
        self._run = uuid4().hex

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Draw one completion for each prompt, as TRL asks.

        Args:
            prompts: texts or conversations, a row each: completions of one prompt beside each other.
            trainer: who asks.

        Returns:
            Lists of token ids, `prompt_ids` and `completion_ids`, and `logprobs`: of each token under the
            whole distribution at the temperature, by the weights as they are.

        Raises:
            ValueError: a prompt and `max_completion_length` do not fit the model or the cache.
            MismatchError: a completion that was recomputed has other bits than its record.
        """
        require_but_root(self.model)
        tokens = tokenized(prompts, trainer)
        self._number += 1
        refresh(self.decoder, self.model, self._number)
        engine = self._fitting(tokens)
        if engine.version < self._number:
            engine.update_weights(self.decoder.weights, self._number)
        weights = Weights.of(self.model, trainer.state.global_step)
        batch = engine.generate(self._requests(tokens, weights.step), number=self._number)
        old = self.old.resolve(batch, engine.snapshot, self.recompute)
        ends = old.cu_seqlens.tolist()[1:-1]
        logprobs = old.logprobs.tensor_split(ends)
        record = Record(weights, self._number)
        for completion, numbers in zip(batch.completions, logprobs, strict=True):
            record.rows[_key(torch.cat([completion.prompt, completion.tokens]))] = numbers
        self.record = record
        return {
            "prompt_ids": tokens,
            "completion_ids": [each.tokens.tolist() for each in batch.completions],
            "logprobs": [numbers.tolist() for numbers in logprobs],
        }

    def fresh(self, step: int) -> bool:
        """Whether the weights are still those that the last rollout was drawn with."""
        return self.record is not None and self.record.weights == Weights.of(self.model, step)

    def recompute(self, completions: Sequence[Completion]) -> Recomputed:
        """Log-probabilities by the forward of the update, under the weights as they are."""
        found, device = [torch.empty(0)], next(self.model.parameters()).device
        longest = max((len(each.prompt) + len(each.tokens) for each in completions), default=1)
        many = max(1, MOST_PACKED // longest)
        for start in range(0, len(completions), many):
            part = completions[start : start + many]
            ids = torch.zeros(len(part), longest, dtype=torch.int64)
            labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
            for row, each in enumerate(part):
                begin, end = len(each.prompt), len(each.prompt) + len(each.tokens)
                ids[row, :end], mask[row, :end] = torch.cat([each.prompt, each.tokens]), 1
                labels[row, begin:end] = each.tokens
            places = [each.to(device) for each in (ids, mask, labels)]
            with torch.no_grad():
                scored, _ = padded_logprobs(
                    self.model, *places, temperature=self.sampling.temperature, look=False
                )
            found.append(scored.cpu()[labels[:, 1:] != -100])
        return Recomputed(torch.cat(found))

    def _requests(self, tokens: Sequence[Sequence[int]], step: int) -> list[Request]:
        """A request for each row; rows of one prompt that stand together are samples of one seed."""
        seed = prompt_seed(prompt_seed(self.seed, step), self._number)
        requests: list[Request] = []
        prompt, sample = -1, 0
        for row, ids in enumerate(tokens):
            new = row == 0 or ids != tokens[row - 1]
            prompt, sample = (prompt + 1, 0) if new else (prompt, sample + 1)
            held = torch.tensor(ids, dtype=torch.int32)
            requests.append(Request(held, self.sampling, prompt, sample, prompt_seed(seed, prompt)))
        return requests

    def _fitting(self, tokens: Sequence[Sequence[int]]) -> Engine:
        """The engine, made or made larger so that every request fits."""
        longest = max(map(len, tokens)) + self.sampling.max_tokens
        if self.engine is not None and (self.settings is not None or longest <= self.engine.longest):
            return self.engine
        settings = self.settings
        if settings is None:
            rows = min(len(tokens), 256)
            room = max(longest, min(rows * 2 ** math.ceil(math.log2(longest)), MOST_CACHED))
            settings = EngineSettings(cache_tokens=room, max_sequences=rows, step_tokens=max(2048, rows))
        self.engine = Engine(self.decoder, settings, run=self._run, version=self._number)
        return self.engine


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with a unified policy and rollout log-probabilities that are reused.

    Args:
        model: a path, or a transformers model that `unify` covers; it stays unified. On a GPU in bfloat16 or
            float16: `model_init_kwargs={"dtype": "bfloat16"}` for a path.
        reward_funcs: as TRL's.
        args: a GRPOConfig; `refuse` says what is not covered. Mixed precision (`bf16`) changes nothing: the
            unified operators compute in the dtype of the parameters.
        others: by position, as TRL's constructor.
        engine: limits of the rollout engine; made to fit by default.
        reuse: `require`, `auto` or `never`, as `rl.reuse.Mode`.
        check: completions of each rollout that are recomputed and compared before they are reused; two.
        require_certificate: as `unify`.
        options: TRL's, by name.

    Raises:
        ValueError: the model or an option is not covered; the message names it.
        RuntimeError: a certificate is required and missing.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *others: Any,
        engine: EngineSettings | None = None,
        reuse: Mode | str = Mode.REQUIRE,
        check: SpotCheck | None = None,
        require_certificate: bool = False,
        **options: Any,
    ) -> None:
        if trl.__version__ not in TESTED_TRL:
            tested = ", ".join(TESTED_TRL)
            warnings.warn(f"this was tested with TRL {tested}, not with {trl.__version__}", stacklevel=2)
        for name in ANSWERED:
            if options.get(name) is not None:
                raise ValueError(f"{name} must be left out: it is not covered")
        if args is not None:
            refuse(args)
        if "forward" in getattr(model, "__dict__", {}):
            raise ValueError("model.forward was replaced, by another trainer perhaps: load the model anew")
        self.rollout: Rollout | None = None
        self._since_log: list[dict[str, float]] = []
        self._compared = 0
        self._latest: list[Tensor] = []
        super().__init__(model, reward_funcs, args, *others, rollout_func=self._draw, **options)
        refuse(self.args)
        if self.aux_loss_enabled:
            raise ValueError("router_aux_loss_coef must be 0.0: the routers' auxiliary loss is not covered")
        for each in (self.model, self.ref_model):
            if each is not None:
                del each.forward  # TRL's fused head, in whose place ours comes
                unify(each, require_certificate=require_certificate).require()
        self.rollout = Rollout(
            self.model, self.args, self.eos_token_ids, engine=engine, mode=reuse, check=check
        )
        self._score_by_operators(self.model, policy=True)
        if self.ref_model is not None:
            self._score_by_operators(self.ref_model, policy=False)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss over the rollout's log-probabilities; before the first step ratios must be exactly 1.

        Raises:
            MismatchError: the forward that has gradients gives a token another log-probability than the
                rollout recorded, under the same weights.
            RuntimeError: the weights were written between a rollout and its first loss.
        """
        rollout = self.rollout
        assert rollout is not None and rollout.record is not None
        mask = inputs["completion_mask"].bool()
        sampled = inputs["sampling_per_token_logps"]
        if inputs.get("old_per_token_logps") is None:
            inputs = {**inputs, "old_per_token_logps": torch.where(mask, sampled, 0.0)}
        self._latest.clear()
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.model.training:
            return loss
        first = self._compared != rollout.record.number
        if rollout.fresh(self.state.global_step):
            assert self._latest, "TRL computes its loss by a forward of the model"
            self._compare(self._latest[-1][:, -mask.shape[1] :], sampled, inputs["old_per_token_logps"], mask)
        elif first:
            raise RuntimeError(
                "the weights were written between a rollout and its first loss, so its log-probabilities are "
                "not theirs: write weights in on_step_end, not in a reward function"
            )
        self._compared = rollout.record.number
        return loss

    def create_optimizer(self, *given: Any, **options: Any) -> Any:
        """TRL's optimizer; where parameters have 16 bits it moves float32 masters of them."""
        made = super().create_optimizer(*given, **options)
        if not made.state:
            keep_float_masters(made)
        return made

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's metrics and those of the mismatch, under the names that TRL has for vLLM's."""
        if self.model.training and self._since_log:
            logs = {**logs, **summary(self._since_log)}
            self._since_log = []
            assert self.rollout is not None
            counters = self.rollout.old.counters
            logs |= {
                "kernelbraid/reused_rollouts": counters.reused_batches,
                "kernelbraid/recomputed_rollouts": counters.recomputed_batches,
                "kernelbraid/checked_tokens": counters.checked_tokens,
                "kernelbraid/forwards_answered": self.rollout.answered,
            }
        super().log(logs, start_time)

    def _draw(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert self.rollout is not None
        return self.rollout(prompts, trainer)

    def _score_by_operators(self, model: Any, *, policy: bool) -> None:
        """Set the forward that TRL asks with `fused_lm_head=True`; every other call is transformers' own."""
        own = type(model).forward

        @functools.wraps(own)
        def forward(self_: Any, *given: Any, fused_lm_head: bool = False, **options: Any) -> Any:
            if not fused_lm_head:
                return own(self_, *given, **options)
            return self._scored(self_, policy, *given, **options)

        model.forward = MethodType(forward, model)

    def _scored(
        self,
        model: Any,
        policy: bool,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        **options: Any,
    ) -> Scored:
        given = [name for name, value in options.items() if value is not None and value is not False]
        if given:
            raise ValueError(f"{', '.join(given)}: not covered where log-probabilities are computed")
        rollout = self.rollout
        assert rollout is not None
        recalls = policy and model.training and not torch.is_grad_enabled()
        if recalls and rollout.record is not None and rollout.fresh(self.state.global_step):
            held = rollout.record.answer(input_ids, attention_mask, labels)
            if held is not None:
                rollout.answered += 1
                return Scored(log_probs=held)
        with torch.autocast(input_ids.device.type, enabled=False):
            scored, entropies = padded_logprobs(
                model, input_ids, attention_mask, labels, temperature=self.temperature, look=False
            )
        if policy:
            self._latest.append(scored.detach())
        return Scored(log_probs=scored, entropy=entropies)

    def _compare(self, scored: Tensor, sampled: Tensor, old: Tensor, mask: Tensor) -> None:
        for name, record in (("sampling_per_token_logps", sampled), ("old_per_token_logps", old)):
            one, other = scored[mask], record[mask]
            places = unequal(one, other)
            if len(places):
                place = int(places[0])
                raise MismatchError(
                    f"before the first optimizer step every ratio must be 1: {len(places)} of {len(one)} "
                    f"log-probabilities differ in bits from {name}, first {float(one[place])!r} against "
                    f"{float(other[place])!r}"
                )
        self._since_log.append(mismatch(scored, sampled, mask))


def mismatch(scored: Tensor, sampled: Tensor, mask: Tensor) -> dict[str, float]:
    """TRL's metrics of how far a sampler's log-probabilities are from the trainer's, with its formulas.

    Args:
        scored: float32, the trainer's.
        sampled: float32, the sampler's.
        mask: bool, where tokens count.
    """
    names = ("sampling_logp_difference", "importance_sampling_ratio")
    logs = (scored - sampled)[mask].float()
    if not len(logs):
        return {}
    gaps, ratios = logs.abs(), logs.exp()
    return {
        f"sampling/{names[0]}/mean": float(gaps.mean()),
        f"sampling/{names[0]}/max": float(gaps.max()),
        f"sampling/{names[1]}/min": float(ratios.min()),
        f"sampling/{names[1]}/mean": float(ratios.mean()),
        f"sampling/{names[1]}/max": float(ratios.max()),
    }


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several micro-batches as one: least, mean and largest by the end of the name."""
    names = dict.fromkeys(name for each in found for name in each)
    held = {name: [each[name] for each in found if name in each] for name in names}
    ways: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "mean": fmean}
    return {name: ways[name.rsplit("/", 1)[-1]](numbers) for name, numbers in held.items()}


def require_but_root(model: Any) -> None:
    """Raise ValueError where a module but the model itself, whose forward TRL replaces, is not unified."""
    left = {name: why for name, why in report(model).left.items() if name}
    if left:
        name, why = next(iter(left.items()))
        raise ValueError(f"{len(left)} modules are not unified any more, first {name} ({why}): unify(model)")


def tokenized(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Token ids of prompts, texts or conversations, as TRL makes them."""
    tokenizer = trainer.processing_class
    if not trl.is_conversational({"prompt": prompts[0]}):
        return [list(ids) for ids in tokenizer(text=prompts)["input_ids"]]
    found = tokenizer.apply_chat_template(
        conversation=prompts,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    masks = found.get("attention_mask") or [[1] * len(ids) for ids in found["input_ids"]]
    return [
        [token for token, real in zip(ids, mask, strict=True) if real]
        for ids, mask in zip(found["input_ids"], masks, strict=True)
    ]
