"""The tokenizer of small random models: one token for each printable character of ASCII."""

from collections.abc import Sequence

END = 0
"""The token that ends a sequence."""
FIRST = 32
VOCABULARY = 96


class Characters:
    """Token 0 ends a sequence, tokens 1 to 95 are the characters from space to tilde."""

    chat_template = None
    eos_token_id = END

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Token ids of a text.

        Raises:
            ValueError: it holds a character that has none.
        """
        ids = [ord(each) - FIRST + 1 for each in text]
        for character, token in zip(text, ids, strict=True):
            if not 1 <= token < VOCABULARY:
                raise ValueError(f"a random model's prompts are printable ASCII, got {character!r}")
        return {"input_ids": ids}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; the end is left out, or shown as a line's end.

        Models of a larger vocabulary draw tokens that are no character: they come again and again.
        """
        end = "" if skip_special_tokens else "\n"
        ids = (int(each) if each < VOCABULARY else 1 + int(each) % (VOCABULARY - 1) for each in tokens)
        return "".join(chr(each + FIRST - 1) if each else end for each in ids)
