"""Tasks: order, resuming, long prompts, files, reward functions, chat templates, graders."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from kernelbraid.rl.tasks.chat import Encoder
from kernelbraid.rl.tasks.examples import Example, Message, as_reward
from kernelbraid.rl.tasks.feed import Feed, order
from kernelbraid.rl.tasks.gym import Gym, answer_of
from kernelbraid.rl.tasks.jsonl import JsonLines
from kernelbraid.rl.tasks.rewards import load_reward


class Numbers:
    """Prompt n has n % 7 + 1 tokens."""

    def __init__(self, size: int, identity: str = "numbers") -> None:
        self.size, self.identity = size, identity

    def __len__(self) -> int:
        return self.size

    def example(self, index: int) -> Example:
        return Example(index, "x" * (index % 7 + 1))

    def reward(self, example: Example, completion: str) -> float:
        return float(len(completion))


def encode(example: Example) -> list[int]:
    return [ord(letter) for letter in str(example.prompt)]


def feed(size: int = 10, **options: Any) -> Feed:
    return Feed(Numbers(size), encode, **{"seed": 1, "limit": 7, **options})


def indices(source: Feed, count: int) -> list[int]:
    return [each.example.index for each in source.take(count)]


def test_order_is_the_same_everywhere() -> None:
    assert order(8, seed=1, epoch=0) == [5, 1, 2, 0, 4, 7, 6, 3]
    assert order(8, seed=1, epoch=1) == [3, 2, 4, 6, 1, 5, 7, 0]
    assert order(100, 1, 0) != order(100, 1, 1) != order(100, 2, 1)
    assert order(100, 1, 0) == order(100, 1, 0)


def test_feeds_go_through_epochs() -> None:
    source = feed()
    first, second = indices(source, 10), indices(source, 10)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert [each.epoch for each in source.take(1)] == [2] and source.position == 21
    assert indices(feed(shuffle=False), 12) == [*range(10), 0, 1]
    [prompt] = feed(shuffle=False).take(1)
    assert prompt.tokens.tolist() == [120] and prompt.position == 0


@pytest.mark.parametrize("position", [0, 1, 9, 10, 13, 27])
def test_feeds_resume_at_any_position(position: int) -> None:
    whole = feed(on_long="drop", limit=6)
    wanted = [(each.position, each.example.index) for each in whole.take(40)]
    one = feed(on_long="drop", limit=6)
    found = [(each.position, each.example.index) for each in one.take(position)]
    other = feed(on_long="drop", limit=6)
    other.restore(json.loads(json.dumps(one.state())))
    found += [(each.position, each.example.index) for each in other.take(40 - position)]
    assert found == wanted and other.state() == whole.state()


def test_feeds_resume_on_the_same_task_alone() -> None:
    state = feed().state()
    for other, message in (
        (feed(seed=2), "seed of the prompts was 1 and is 2"),
        (feed(11), "size of the prompts was 10 and is 11"),
        (feed(limit=8), "limit of the prompts was 7 and is 8"),
        (Feed(Numbers(10, "letters"), encode, seed=1, limit=7), "task of the prompts was 'numbers' and is"),
    ):
        with pytest.raises(ValueError, match=message):
            other.restore(state)


def test_long_prompts() -> None:
    with pytest.raises(
        ValueError, match="prompt 5 of numbers has 6 tokens, the limit is 5: raise it, or drop"
    ):
        feed(shuffle=False, limit=5).take(10)
    source = feed(shuffle=False, limit=5, on_long="drop")
    assert indices(source, 10) == [0, 1, 2, 3, 4, 7, 8, 9, 0, 1]
    assert source.dropped == 2 and source.position == 12
    prompts = source.take(3)
    assert [each.position for each in prompts] == [12, 13, 14]
    never = Feed(Numbers(5), lambda example: [1] * 9, seed=1, limit=8, on_long="drop")
    with pytest.raises(ValueError, match="every prompt of numbers is longer than 8 tokens"):
        never.take(1)
    with pytest.raises(ValueError, match="prompt 0 of numbers has no tokens"):
        Feed(Numbers(1), lambda example: [], seed=1, limit=8).take(1)
    for options, message in (
        ({"limit": 0}, "limit must be at least 1"),
        ({"on_long": "cut"}, "on_long must be one of refuse, drop, got 'cut'"),
        ({"size": 0}, "task numbers has no examples"),
    ):
        with pytest.raises(ValueError, match=message):
            feed(**options)  # type: ignore[arg-type]


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "task.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return path


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Weights:\n"
        "    length: float = 1.0\n"
        "def near(completion, record):\n"
        "    return None if completion == '?' else -abs(len(completion) - record['length'])\n"
        "def wrong(completion, record):\n"
        "    return {'nan': float('nan'), 'text': 'good', 'list': []}[completion]\n"
        "value = 3\n"
    )
    return path


def test_tasks_in_files(tmp_path: Path, reward_file: Path) -> None:
    conversation = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    path = file_of(tmp_path, {"prompt": "Say hi", "length": 2}, "", {"prompt": conversation, "length": 5}, "")
    task = JsonLines(path, f"{reward_file}:near")
    assert len(task) == 2
    first, second = task.example(0), task.example(1)
    assert first == Example(0, "Say hi", {"prompt": "Say hi", "length": 2})
    assert second.prompt == (Message("system", "Be short."), Message("user", "Hi")) and second.index == 1
    assert task.reward(first, "hello") == -3.0 and task.reward(second, "hello") == 0
    assert math.isnan(task.reward(first, "?"))
    identity = task.identity
    reward_file.write_text(reward_file.read_text() + "# changed\n")
    assert JsonLines(path, f"{reward_file}:near").identity != identity
    with pytest.raises(KeyError) as caught:
        JsonLines(path, f"{reward_file}:wrong").reward(second, "?")
    assert "of example 1" in caught.value.__notes__[0]
    for answer in ("nan", "text", "list"):
        with pytest.raises(ValueError, match="of example 1 must return a finite number, or None"):
            JsonLines(path, f"{reward_file}:wrong").reward(second, answer)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON: .* column 2"),
        ("[1]", "line 2 must be an object with 'prompt'"),
        ({"question": "x"}, "line 2 must be an object with 'prompt'"),
        ({"prompt": ""}, "line 2: the prompt must be a text, or a list"),
        ({"prompt": []}, "line 2: the prompt must be a text, or a list"),
        ({"prompt": [{"role": "user"}]}, "line 2: the prompt must be a text, or a list"),
    ],
)
def test_lines_are_checked(tmp_path: Path, reward_file: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonLines(file_of(tmp_path, {"prompt": "fine"}, line), f"{reward_file}:near")


def test_files_are_checked(tmp_path: Path, reward_file: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        JsonLines(tmp_path / "absent.jsonl", f"{reward_file}:near")
    with pytest.raises(ValueError, match="holds no examples"):
        JsonLines(file_of(tmp_path, "", ""), f"{reward_file}:near")
    (tmp_path / "task.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8: byte 12"):
        JsonLines(tmp_path / "task.jsonl", f"{reward_file}:near")


def test_reward_functions_by_name(tmp_path: Path, reward_file: Path) -> None:
    assert load_reward("json:loads") is json.loads
    for path, message in (
        ("json", "reward must be module:function or file.py:function, got 'json'"),
        ("json:", "reward must be module:function"),
        ("json:loads()", "reward must be module:function"),
        ("json:absent", "json has no function absent"),
        (f"{reward_file}:value", "has no function value"),
        ("no_such_module:f", "there is no module no_such_module"),
        ("json.absent:f", r"there is no module json\.absent"),
        (f"{tmp_path}/absent.py:f", r"there is no file .*absent\.py"),
    ):
        with pytest.raises(ValueError, match=message):
            load_reward(path)
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_reward(f"{broken}:f")


def test_rewards_are_numbers() -> None:
    assert as_reward(True, "f") == 1 and as_reward(2, "f") == 2 and math.isnan(as_reward(None, "f"))
    for value in ("1", math.nan, math.inf, [1.0]):
        with pytest.raises(ValueError, match="f must return a finite number"):
            as_reward(value, "f")


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra | default('') }}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a character, made here."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(code): code - 32 for code in range(32, 127)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({**letters, "[U]": 95}, unk_token="[U]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[U]")


def test_plain_prompts(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, "plain")
    ids = encoder(Example(0, "Hi you"))
    assert encoder.decode(ids) == "Hi you" and len(ids) == 6
    with pytest.raises(ValueError, match="prompt 4 is a conversation: use template `chat`"):
        encoder(Example(4, (Message("user", "x"),)))
    with pytest.raises(ValueError, match="system and options go with template `chat` alone"):
        Encoder(tokenizer, "plain", system="x")
    with pytest.raises(ValueError, match="template must be one of chat, plain, got 'alpaca'"):
        Encoder(tokenizer, "alpaca")


def test_chat_templates(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template: use template `plain`"):
        Encoder(tokenizer)
    tokenizer.chat_template = TEMPLATE
    text = Example(0, "Hi")
    turns = Example(1, (Message("system", "S"), Message("user", "Hi")))

    def shown(encoder: Encoder, example: Example) -> str:
        return encoder.decode(encoder(example))

    assert shown(Encoder(tokenizer), text) == "<user>Hi</s><assistant>"
    assert shown(Encoder(tokenizer), turns) == "<system>S</s><user>Hi</s><assistant>"
    assert shown(Encoder(tokenizer, system="T"), text) == "<system>T</s><user>Hi</s><assistant>"
    assert shown(Encoder(tokenizer, system="T"), turns) == "<system>S</s><user>Hi</s><assistant>"
    assert shown(Encoder(tokenizer, options={"extra": "!"}), text).endswith("<assistant>!")


def test_answers_between_tags() -> None:
    assert answer_of("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert answer_of("<answer></answer>") == ""
    assert answer_of("2") is None and answer_of("<answer>2") is None


@pytest.mark.slow
class TestGym:
    """Datasets of reasoning-gym themselves."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_right_and_wrong_answers(self) -> None:
        task = Gym("chain_sum", seed=5, size=20)
        again = Gym("chain_sum", seed=5, size=20)
        assert len(task) == 20 and task.identity == again.identity
        for index in (0, 19):
            example = task.example(index)
            assert example == again.example(index)
            assert task.reward(example, f"so <answer>{example.record['answer']}</answer>") == 1
            assert task.reward(example, f"so {example.record['answer']}") == 0
            assert task.reward(example, "<answer>no</answer>") == 0
        system, user = task.example(0).prompt
        assert isinstance(system, Message) and isinstance(user, Message)
        assert system.role == "system" and "<answer>" in system.content
        assert task.example(0).record["question"] == user.content
        assert len(Gym("chain_sum", seed=5, size=2, instruction=None).example(0).prompt) == 1

    def test_thresholds_of_partial_scores(self) -> None:
        plain, strict = (Gym("countdown", seed=1, size=5, threshold=limit) for limit in (None, 1.0))
        example = plain.example(0)
        assert 0 < plain.reward(example, "<answer>5</answer>") < 1
        assert strict.reward(example, "<answer>5</answer>") == 0
        assert strict.reward(example, f"<answer>{example.record['answer']}</answer>") == 1

    def test_failures_of_a_grader_are_no_reward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        task = Gym("chain_sum", seed=5, size=2)

        def fails(answer: str, entry: object) -> float:
            raise ZeroDivisionError("1/0")

        monkeypatch.setattr(task.dataset, "score_answer", fails)
        with pytest.warns(RuntimeWarning, match="chain_sum could not score an answer to example 1: ZeroDiv"):
            assert math.isnan(task.reward(task.example(1), "<answer>1/0</answer>"))
        assert task.unscored == 1

    def test_arguments(self) -> None:
        for options, message in (
            ({"name": "chain_sums"}, "has no dataset 'chain_sums'; near it are chain_sum"),
            ({"seed": -1}, "seed must be from 0"),
            ({"size": 0}, "size must be at least 1"),
            ({"threshold": 1.5}, "threshold must be above 0 and at most 1"),
            ({"config": {"colour": 1}}, "dataset chain_sum refuses its options: .*colour"),
            ({"config": {"min_terms": 9, "max_terms": 2}}, "dataset chain_sum refuses its options"),
        ):
            with pytest.raises(ValueError, match=message):
                Gym(**{"name": "chain_sum", "seed": 1, "size": 2, **options})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="index must be from 0 to 1, got 2"):
            Gym("chain_sum", seed=1, size=2).example(2)

    def test_it_feeds(self) -> None:
        source = Feed(Gym("chain_sum", seed=5, size=6), lambda e: [1] * len(e.prompt), seed=3, limit=10)
        assert sorted(each.example.index for each in source.take(6)) == list(range(6))


class TestMath:
    """Answers compared by math-verify."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("math_verify")

    @pytest.mark.parametrize(
        ("completion", "answer", "wanted"),
        [
            ("It is \\boxed{\\frac{1}{2}}.", "0.5", 1),
            ("It is $\\frac{1}{2}$.", "$\\frac12$", 1),
            ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", 1),
            ("\\boxed{1,234}", 1234, 1),
            ("so x is 42", "42", 1),
            ("so x is 41", "42", 0),
            ("I do not know", "42", 0),
            ("", "42", 0),
        ],
    )
    def test_answers(self, completion: str, answer: object, wanted: float) -> None:
        reward = load_reward("kernelbraid.rl.tasks.math_answers:reward")
        assert reward(completion, {"answer": answer}) == wanted

    def test_refusals(self) -> None:
        from kernelbraid.rl.tasks.math_answers import reward

        with pytest.raises(ValueError, match="must hold the right answer under 'answer'"):
            reward("1", {})
        with pytest.raises(ValueError, match="the right answer cannot be read: ''"):
            reward("1", {"answer": ""})
        caught: list[Exception] = []

        def elsewhere() -> None:
            try:
                reward("1", {"answer": "1"})
            except RuntimeError as error:
                caught.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "must run in the main thread" in str(caught[0])
