"""The judge prompt."""

_OPENING = "Please judge the following response based on the question and the response to be evaluated."
_OPERATION = (
    "Operation: Output ONLY a JSON object with one score in this exact format. "
    "Score must be in the range of 1 to 10. Your output should be like this:"
)
_FORMAT = '{"score": score}'

DIGITS_PREFIX = '{"score": '
"""The assistant's reply up to the JSON value position, where the `digits` mode reads the distribution of the score."""


def judge_prompt(instruction: str, response: str) -> str:
    """The judge's user message (Stackelberg Alignment, Appendix G), its last line the exact JSON format.

    Both texts are put in as they are: braces, format fields and the prompt's own words in them stay untouched.

    Args:
      instruction: the prompt that was answered.
      response: the answer to score.
    """
    return "\n".join(
        (_OPENING, "Question: " + instruction, "Response to be evaluated: " + response, _OPERATION, _FORMAT)
    )
