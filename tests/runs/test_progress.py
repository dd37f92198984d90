import io

import pytest

from stackalign.runs import progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(**kwargs):
    clock, stream = Clock(), io.StringIO()
    return progress.Bars(stream=stream, clock=clock, **kwargs), clock, stream


def test_off_a_terminal_one_plain_line_ends_a_phase():
    bars, clock, stream = make()
    bars("iteration", 0, 2, "it")
    for done in range(5):
        bars("generate", done, 4, "duel")
        clock.now += 0.5
    clock.now = 10.0
    bars("iteration", 1, 2, "it")
    bars("iteration", 2, 2, "it")
    bars.close()
    assert stream.getvalue().splitlines() == [
        "  generate: 4/4 duel in 2.0 s (2 duel/s)",
        "iteration 1/2: 10.0 s elapsed, about 10.0 s left",
        "iteration 2/2: 10.0 s elapsed",
    ]
    assert "\r" not in stream.getvalue()


def test_a_resumed_run_reckons_with_its_own_iterations():
    bars, clock, stream = make()
    bars("iteration", 6, 8)
    clock.now = 100.0
    bars("iteration", 7, 8)
    assert stream.getvalue() == "iteration 7/8: 1 min 40 s elapsed, about 1 min 40 s left\n"


def test_seconds_by_phase_add_up():
    bars, clock, _ = make()
    for seconds in (2.0, 3.0):
        bars("judge", 0, 1)
        clock.now += seconds
        bars("judge", 1, 1)
        clock.now += 100.0  # between phases: nobody's
    bars("train", 0, 2)
    clock.now += 1.0
    bars("judge", 0, 1)  # ends the training, unfinished
    clock.now += 0.25
    assert bars.seconds() == {"judge": 5.0, "train": 1.0}
    bars.close()
    assert bars.seconds(reset=True) == {"judge": 5.25, "train": 1.0}
    assert bars.seconds() == {}


def test_a_phase_that_starts_over_is_a_new_one():
    bars, clock, stream = make()
    bars("judge", 0, 3)
    clock.now = 1.0
    bars("judge", 2, 3)
    bars("judge", 0, 3)
    clock.now = 3.0
    bars("judge", 3, 3)
    assert stream.getvalue().splitlines() == ["  judge: 2/3 in 1.0 s (2 it/s)", "  judge: 3/3 in 2.0 s (1.5 it/s)"]
    assert bars.seconds() == {"judge": 3.0}


def test_phase_and_each():
    bars, clock, stream = make()
    with bars.phase("load", 2, "file") as advance:
        clock.now = 1.0
        advance(2)
    found = []
    for item in bars.each([1, 2, 3], "score", "pair"):
        clock.now += 1.0
        found.append(item)
    assert found == [1, 2, 3] and bars.seconds() == {"load": 1.0, "score": 3.0}
    with pytest.raises(KeyError), bars.phase("bad", 5):
        clock.now += 1.0
        raise KeyError
    assert bars.seconds()["bad"] == 1.0
    bars("none", 0, 0)
    assert stream.getvalue().splitlines()[-1] == "  bad: 0/5 in 1.0 s"  # an empty phase says nothing


def test_on_a_terminal_there_are_bars():
    bars, _, stream = make(interactive=True)
    with bars:
        bars("iteration", 0, 2, "it")
        bars("generate", 0, 10, "duel")
        bars("generate", 10, 10, "duel")
        bars.write("a line")
        bars("iteration", 2, 2, "it")
    text = stream.getvalue()
    assert "\r" in text and "generate:" in text and "2/2" in text and "a line\n" in text


def test_durations_are_short():
    assert [progress._brief(seconds) for seconds in (0.04, 99.9, 100, 3599.7, 7325)] == [
        "0.0 s",
        "99.9 s",
        "1 min 40 s",
        "1 h 00 min",
        "2 h 02 min",
    ]
