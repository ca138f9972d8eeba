"""The configuration of a training run, in YAML: what may stand in it, and what goes together.

Every key is known or an error; all errors are reported at once, each under the path of its key.
"""

import difflib
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernelbraid.models.config import named
from kernelbraid.rl.losses import Grpo, KlEstimator, Ppo
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.reuse import Mode, Named, Objective
from kernelbraid.rl.spot_check import OnMismatch, SpotCheck
from kernelbraid.rl.tasks.chat import Template
from kernelbraid.rl.tasks.examples import Task
from kernelbraid.rl.tasks.feed import LongPrompt

MATH_REWARD = "kernelbraid.rl.tasks.math_answers:reward"

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Kernels(StrEnum):
    """What computes rollout and update."""

    UNIFIED = "unified"
    """Unified operators: the same bits in both."""
    VENDOR = "vendor"
    """What torch ships, on the same engine: the arm to compare with."""


class Old(StrEnum):
    """Where old log-probabilities come from."""

    REUSE = "reuse"
    """The rollout's, where that is valid: `Mode` decides and the spot check tests."""
    RECOMPUTE = "recompute"
    """A forward pass of the update before the first step."""
    BYPASS = "bypass"
    """The rollout's, whatever they are worth: nothing is decided and nothing tested."""
    DETACH = "detach"
    """Those of the present step, without gradient: every ratio is 1, also after the first step."""


class Section(BaseModel):
    """A part of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RandomModel(Section):
    """Sizes of a small Llama whose tokens are the printable characters of ASCII."""

    layers: Positive = 2
    hidden: Positive = 64
    intermediate: Positive = 128
    query_heads: Positive = 2
    kv_heads: Positive = 1
    head_dim: Literal[64, 128] = 64
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0

    @model_validator(mode="after")
    def _groups(self) -> "RandomModel":
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads must be a multiple of kv_heads {self.kv_heads}, got {self.query_heads}"
            )
        return self


class ModelSection(Section):
    """The policy."""

    path: str | None = None
    """A folder with safetensors or a GGUF file; relative to the configuration's folder."""
    random: RandomModel | None = None
    """A small model drawn at random, in the place of a path."""
    named: str | None = None
    """A published model's name, such as Qwen3-1.7B: its sizes with random weights, for measurements."""
    kernels: Kernels = Kernels.UNIFIED
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    positions: Positive | None = None
    """That the rotary tables cover; by default the model's own limit."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSection":
        if sum(each is not None for each in (self.path, self.random, self.named)) != 1:
            raise ValueError("one of path, random and named must be given")
        if self.named is not None:
            named(self.named)  # raises ValueError where there is none
        return self

    @model_validator(mode="after")
    def _dtype_of_device(self) -> "ModelSection":
        if (self.device == "cpu") != (self.dtype == "float32"):
            wanted = "float32" if self.device == "cpu" else "bfloat16 or float16"
            raise ValueError(f"dtype must be {wanted} on {self.device}, got {self.dtype}")
        return self


class PromptSection(Section):
    """What all tasks have."""

    template: Template = Template.CHAT
    system: str | None = None
    max_prompt_tokens: Positive = 512
    on_long: LongPrompt = LongPrompt.REFUSE
    shuffle: bool = True


class JsonlSection(PromptSection):
    """Prompts in a file, and a reward function."""

    kind: Literal["jsonl"]
    path: str
    reward: str
    """`module:function`, or `file.py:function`; files are relative to the configuration's folder."""
    prompt_key: str = "prompt"


class MathSection(PromptSection):
    """Prompts in a file, with the right answers under `answer`."""

    kind: Literal["math"]
    path: str
    prompt_key: str = "prompt"


class GymSection(PromptSection):
    """A dataset of reasoning-gym."""

    kind: Literal["gym"]
    name: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    size: Positive = 10000
    config: dict[str, Any] = Field(default_factory=dict)
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None


TaskSection = Annotated[JsonlSection | MathSection | GymSection, Field(discriminator="kind")]


class RolloutSection(Section):
    """How much is drawn before each update, and what is recorded."""

    prompts: Positive = 8
    group_size: Positive = 8
    """Completions of each prompt."""
    cache_tokens: Positive = 1024
    """The longest sequence, prompt and completion, that the cache has pages for."""
    concurrent: Positive = 64
    """The most completions that are drawn at a time; the cache has room for all of them at their longest."""
    step_tokens: Positive = 512
    """The most tokens of a call of the model: one a running completion, the rest for pieces of prompts."""
    record: tuple[Named, ...] = (Named.WHOLE, Named.PROCESSED)
    """Which log-probabilities; `processed` costs nothing where nothing is cut, penalised or biased."""
    ignore_end: bool = False
    """Draw every completion to `max_tokens`, over tokens that end a sequence: for measurements."""

    @property
    def completions(self) -> int:
        return self.prompts * self.group_size


class ReuseSection(Section):
    """Where old log-probabilities come from."""

    old: Old = Old.REUSE
    """The arm: `mode` and `spot_check` are those of `reuse`."""
    mode: Mode = Mode.AUTO
    logprob: Named = Named.WHOLE
    """Which one the loss names."""
    spot_check: SpotCheck = Field(default_factory=SpotCheck)

    @model_validator(mode="after")
    def _required_means_stop(self) -> "ReuseSection":
        if self.mode == Mode.REQUIRE and self.spot_check.on_mismatch == OnMismatch.FALL_BACK:
            raise ValueError("spot_check.on_mismatch must be stop where mode is require")
        if self.old != Old.REUSE and self.mode != Mode.AUTO:
            raise ValueError(f"mode goes with old reuse alone, not with {self.old.value}")
        return self


class KlSection(Section):
    """A penalty to the policy that training began with."""

    weight: NotNegative = 0.0
    estimator: KlEstimator = KlEstimator.K3
    placed: Literal["loss", "reward"] = "loss"


class GaeSection(Section):
    """Generalized advantage estimation, for PPO."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95


class UpdateSection(Section):
    """The optimizer and its steps on one rollout."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    weight_decay: NotNegative = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    epochs: Positive = 1
    """Over each rollout."""
    minibatches: Positive = 1
    """Optimizer steps of an epoch."""
    micro_batch_tokens: Positive = 8192
    """The most tokens of a forward and backward pass; a longer sequence is a pass of its own."""
    masters: bool = True
    """Keep float32 masters of parameters of 16 bits, which the optimizer moves; without, it moves the
    parameters themselves, rounded at every step, with a state of 16 bits: less memory, and steps that are
    too small for 16 bits are lost."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    mask_truncated: bool = False
    """Leave completions out of the loss that ended at `max_tokens`."""


class CheckpointSection(Section):
    """What a run can be resumed from."""

    folder: str = "checkpoints"
    every: Annotated[int, Field(ge=0)] = 50
    """Rollouts between two checkpoints; 0: only one, at the end."""
    keep: Positive = 2


class LoggingSection(Section):
    """What a run tells."""

    folder: str = "logs"
    every: Positive = 1
    """Rollouts between two rows."""
    completions: Annotated[int, Field(ge=0)] = 1
    """Texts of a rollout that are kept with its row."""
    tensorboard: bool = False
    """Scalars for TensorBoard too (extra `tensorboard`)."""


class Config(Section):
    """A whole training run."""

    algorithm: Literal["grpo", "ppo"]
    rollouts: Positive
    """How many, each with its update."""
    model: ModelSection
    task: TaskSection
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    parallel: Literal["replicated", "fsdp2"] = "replicated"
    """How processes of torchrun hold the model: each the whole one, or each a part of what is trained."""
    sampling: Sampling = Field(default_factory=Sampling)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    reuse: ReuseSection = Field(default_factory=ReuseSection)
    grpo: Grpo | None = None
    scale: Literal["group", "batch", "none"] | None = None
    """What group advantages are divided by; `group` by default, with GRPO alone."""
    ppo: Ppo | None = None
    gae: GaeSection | None = None
    kl: KlSection = Field(default_factory=KlSection)
    update: UpdateSection = Field(default_factory=UpdateSection)
    checkpoints: CheckpointSection = Field(default_factory=CheckpointSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)

    @property
    def objective(self) -> Objective:
        """What the loss divides by."""
        return Objective(self.sampling, self.reuse.logprob, values=self.algorithm == "ppo")

    @property
    def loss(self) -> Grpo | Ppo:
        """Options of the loss, the penalty among them where it is placed there."""
        chosen = (self.grpo or Grpo()) if self.algorithm == "grpo" else (self.ppo or Ppo())
        weight = self.kl.weight if self.kl.placed == "loss" else 0.0
        return replace(chosen, kl_weight=weight, kl_estimator=self.kl.estimator)

    @model_validator(mode="after")
    def _goes_together(self) -> "Config":
        wrong = [message for check in _TOGETHER for message in check(self)]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


def _algorithm(config: Config) -> list[str]:
    other = ("ppo", "gae") if config.algorithm == "grpo" else ("grpo", "scale")
    found = [
        f"{name}: goes with algorithm {'ppo' if config.algorithm == 'grpo' else 'grpo'} alone"
        for name in other
        if getattr(config, name) is not None
    ]
    if config.algorithm == "grpo" and config.rollout.group_size == 1:
        found.append("rollout.group_size: must be at least 2 for grpo, whose advantages compare a group")
    if config.algorithm == "grpo" and config.kl.weight and config.kl.placed == "reward":
        found.append("kl.placed: must be loss for grpo, whose rewards belong to whole completions")
    options = config.grpo if config.algorithm == "grpo" else config.ppo
    if options is not None and (options.kl_weight or options.kl_estimator != KlEstimator.K3):
        found.append(f"{config.algorithm}: kl_weight and kl_estimator stand under kl")
    if options is not None and options.fixed_length not in (None, config.sampling.max_tokens):
        found.append(f"{config.algorithm}.fixed_length: must be sampling.max_tokens")
    return found


def _lengths(config: Config) -> list[str]:
    longest = config.task.max_prompt_tokens + config.sampling.max_tokens
    parts = f"task.max_prompt_tokens {config.task.max_prompt_tokens} + sampling.max_tokens "
    parts += f"{config.sampling.max_tokens} = {longest}"
    found = []
    if longest > config.rollout.cache_tokens:
        found.append(f"rollout.cache_tokens: must be at least {parts}, got {config.rollout.cache_tokens}")
    if config.model.positions is not None and longest > config.model.positions:
        found.append(f"model.positions: must be at least {parts}, got {config.model.positions}")
    if config.update.minibatches > config.rollout.completions:
        found.append(
            f"update.minibatches: must be at most the {config.rollout.completions} completions of a rollout, "
            f"got {config.update.minibatches}"
        )
    return found


def _recorded(config: Config) -> list[str]:
    if config.sampling.greedy:
        return ["sampling.temperature: must be above 0, greedy completions have no log-probabilities"]
    if config.reuse.mode != Mode.REQUIRE:
        return []
    if Named.WHOLE in config.rollout.record:  # where nothing is processed, that is the other one too
        return []
    return ["reuse.mode: require needs log-probability 'whole', add it to rollout.record"]


def _computable(config: Config) -> list[str]:
    """What the update cannot compute."""
    found = []
    if config.reuse.logprob == Named.PROCESSED and config.sampling.processed:
        found.append(
            "reuse.logprob: must be whole where tokens are drawn from a cut, penalised or biased "
            "distribution: the update computes the whole one's"
        )
    if config.model.path is None and config.task.template != Template.PLAIN:
        found.append("task.template: must be plain for a random model, which has no chat format")
    return found


_TOGETHER = (_algorithm, _lengths, _recorded, _computable)


def read_config(path: str | Path) -> Config:
    """Read and check a configuration file.

    Args:
        path: YAML 1.2, UTF-8.

    Raises:
        ValueError: no such file, no YAML, a key twice, or something that may not stand there; the message has
            one line an error, with the path of the key.
        ModuleNotFoundError: ruamel.yaml is not installed (extra `rl`).
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    place = Path(path)
    if not place.is_file():
        raise ValueError(f"there is no file {place}")
    try:
        document = YAML(typ="safe", pure=True).load(place.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{place} is not YAML: {_problem(error)}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{place} must hold keys and values")
    return parse_config(document, str(place))


def parse_config(document: dict[str, Any], source: str = "the configuration") -> Config:
    """Check a configuration that was read.

    Args:
        document: as YAML or JSON give it.
        source: named in errors.

    Raises:
        ValueError: as `read_config`.
    """
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        lines = [line for each in error.errors() for line in _lines(dict(each))]
        count = "1 error" if len(lines) == 1 else f"{len(lines)} errors"
        raise ValueError(f"{source} has {count}:\n" + "\n".join(lines)) from None


def make_task(section: JsonlSection | MathSection | GymSection, folder: str | Path = ".") -> Task:
    """The task that a section names.

    Args:
        section: `Config.task`.
        folder: what paths are relative to: that of the configuration.

    Raises:
        ValueError: there is no such file, function or dataset.
        ModuleNotFoundError: the extra `tasks` is needed and not installed.
    """
    from kernelbraid.rl.tasks.gym import Gym
    from kernelbraid.rl.tasks.jsonl import JsonLines

    if isinstance(section, GymSection):
        return Gym(
            section.name, seed=section.seed, size=section.size, config=section.config,
            threshold=section.threshold,
        )  # fmt: skip
    reward = MATH_REWARD
    if isinstance(section, JsonlSection):
        source, _, name = section.reward.rpartition(":")
        reward = f"{Path(folder) / source}:{name}" if source.endswith(".py") else section.reward
    return JsonLines(Path(folder) / section.path, reward, prompt_key=section.prompt_key)


def _lines(error: dict[str, Any]) -> list[str]:
    """One error of pydantic as lines of ours."""
    kinds = {"jsonl", "math", "gym"}
    steps = [str(step) for step in error["loc"]]
    if len(steps) > 1 and steps[0] == "task" and steps[1] in kinds:
        del steps[1]
    where = ".".join(steps)
    if error["type"] == "missing":
        return [f"{where}: must be given"]
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = difflib.get_close_matches(steps[-1], _known_keys(steps[:-1], error), n=1)
        return [f"{where}: there is no such key" + (f"; near it is {near[0]}" if near else "")]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return [f"{where}: {line}" if where else line for line in message.splitlines()]
    return [f"{where}: {message[0].lower()}{message[1:]}, got {error['input']!r}"]


def _known_keys(steps: list[str], error: dict[str, Any]) -> list[str]:
    """Keys of the section that a path leads to."""
    kinds: dict[str, type] = {"jsonl": JsonlSection, "math": MathSection, "gym": GymSection}
    at: Any = Config
    for depth, step in enumerate(steps):
        if depth == 0 and step == "task":
            at = kinds.get(str(error["loc"][1]), PromptSection)
            continue
        field = getattr(at, "model_fields", {}).get(step)
        if field is None:
            return []
        at = field.annotation
        at = next((each for each in getattr(at, "__args__", ()) if each is not type(None)), at)
    return [*getattr(at, "model_fields", ()), *getattr(at, "__dataclass_fields__", ())]


def _problem(error: Exception) -> str:
    """What a parser found, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or error).splitlines()[0]
