"""Token ids of prompts by a tokenizer, with its chat template or without."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from kernelbraid.rl.choices import choose
from kernelbraid.rl.tasks.examples import Example, Message


class Template(StrEnum):
    """How a prompt becomes one text."""

    CHAT = "chat"
    """By the tokenizer's chat template, up to the start of the answer; a text is the user's message."""
    PLAIN = "plain"
    """As it is, for models without a chat format."""


class Encoder:
    """Turns examples into token ids, and token ids into text.

    Args:
        tokenizer: of transformers, or anything with its methods.
        template: `chat` or `plain`.
        system: a system message put before prompts that have none; `chat` alone.
        options: passed on to the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no chat template, or an option goes with `chat` alone.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Template | str = Template.CHAT,
        *,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.system, self.options = tokenizer, system, dict(options or {})
        self.template = choose(Template, "template", template)
        if self.template == Template.CHAT and not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: use template `plain`")
        if self.template == Template.PLAIN and (system is not None or self.options):
            raise ValueError("system and options go with template `chat` alone")

    def __call__(self, example: Example) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError: the prompt is a conversation and the template `plain`.
        """
        if self.template == Template.CHAT:
            found = self.tokenizer.apply_chat_template(
                self._conversation(example), add_generation_prompt=True, tokenize=True, return_dict=False,
                **self.options,
            )  # fmt: skip
            return [int(token) for token in found]
        if not isinstance(example.prompt, str):
            raise ValueError(f"prompt {example.index} is a conversation: use template `chat`")
        return [int(token) for token in self.tokenizer(example.prompt)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _conversation(self, example: Example) -> list[dict[str, str]]:
        turns = example.prompt
        if isinstance(turns, str):
            turns = (Message("user", turns),)
        if self.system is not None and not any(turn.role == "system" for turn in turns):
            turns = (Message("system", self.system), *turns)
        return [{"role": turn.role, "content": turn.content} for turn in turns]
