import hypothesis
from hypothesis import strategies as st

from stackalign.judges import DIGITS_PREFIX, judge_prompt


def test_the_wording_is_the_papers():
    assert judge_prompt("What is 2 + 2?", "4") == (
        "Please judge the following response based on the question and the response to be evaluated.\n"
        "Question: What is 2 + 2?\n"
        "Response to be evaluated: 4\n"
        "Operation: Output ONLY a JSON object with one score in this exact format. "
        "Score must be in the range of 1 to 10. Your output should be like this:\n"
        '{"score": score}'
    )


@hypothesis.given(st.text(), st.text())
@hypothesis.settings(deadline=None, max_examples=50)
def test_texts_go_in_untouched_and_the_format_ends_the_prompt(instruction, response):
    prompt = judge_prompt(instruction, response)
    assert f"Question: {instruction}\nResponse to be evaluated: {response}\nOperation:" in prompt
    assert prompt.endswith('\n{"score": score}')


def test_braces_and_the_prompts_own_words_are_text():
    prompt = judge_prompt("{response} {0} %s Response to be evaluated: x", '{instruction} {"score": 10} {')
    assert "Question: {response} {0} %s Response to be evaluated: x\n" in prompt
    assert 'Response to be evaluated: {instruction} {"score": 10} {\n' in prompt


def test_the_prefix_opens_the_format():
    assert judge_prompt("a", "b").split("\n")[-1].startswith(DIGITS_PREFIX)
