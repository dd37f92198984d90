"""A tokenizer of single characters, for tiny models made in a run."""

from collections.abc import Mapping, Sequence

from stackalign.lm.config import DecoderConfig


class CharTokenizer:
    """One id a character; 0 pads, 1 ends a turn, 2 separates the prompt from the answer.

    Args:
      alphabet: the characters that prompts and answers may use, each once.
    """

    pad_id, end_of_turn, separator = 0, 1, 2
    eos_ids = (1,)

    def __init__(self, alphabet: str):
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("the alphabet repeats a character")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 3
        self._ids = {character: index + 3 for index, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; ValueError names a character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"character {error.args[0]!r} is not in the alphabet {self.alphabet!r}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The user's text and the separator; tiny models have no other role, so a system prompt is an error."""
        if [message["role"] for message in messages] != ["user"]:
            raise ValueError("a character model reads one user message and no system prompt")
        return [*self.encode(messages[0]["content"]), self.separator]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special ids skipped."""
        return "".join(self.alphabet[index - 3] for index in ids if index >= 3)


def tiny_config(vocab_size: int, *, hidden_size=64, num_layers=3, num_heads=4, max_positions=32) -> DecoderConfig:
    """The shape of a tiny decoder: about 150 thousand parameters with the defaults."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tie_embeddings=True,
        max_positions=max_positions,
    )
