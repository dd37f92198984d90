import io

import numpy as np
import pytest
from matplotlib.text import Text

from stackalign.runs import figures


def texts(figure):
    return [item.get_text() for item in figure.findobj(Text) if item.get_visible() and item.get_text()]


def render(figure):
    """Draws the figure: warnings (missing glyphs, layouts that do not fit, empty slices) are errors here."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=40)
    assert buffer.getvalue().startswith(b"\x89PNG")
    return texts(figure)


pytestmark = pytest.mark.filterwarnings("error")
LONG = [f"organisation/A-Very-Long-Model-Name-7B-Instruct-{index}" for index in range(9)]


def weights(rows, arms, seed=0):
    found = np.random.default_rng(seed).dirichlet(np.full(arms, 50.0), rows)
    return found


def test_leader_weights_names_both_ends():
    array = weights(4, 30)
    shown = render(figures.leader_weights(array, [f"task-{arm:02d}" for arm in range(30)]))
    order = np.argsort(-array[-1])
    for arm in range(30):
        label = f"task-{arm:02d}  {array[-1, arm] * 30:.2f}×"
        assert (label in shown) == (arm in order[:5] or arm in order[-5:])


def test_equal_weights_have_no_ends():
    shown = render(figures.leader_weights(np.full((2, 4), 0.25), list("abcd")))
    assert not any("×" in text for text in shown)


@pytest.mark.parametrize(("rows", "arms"), [(1, 2), (1, 1), (2, 3), (9, 64)])
def test_leader_figures_of_any_size(rows, arms):
    names = [f"instruction-{arm}: " + "a long prompt " * 5 for arm in range(arms)]
    array = weights(rows, arms)
    array[0, 0] = np.nan
    render(figures.leader_weights(array, names))
    render(figures.leader_heatmap(array, names))


def test_heatmap_shows_the_most_dynamic():
    array = np.full((3, 50), 1.0)
    array[1, 7], array[2, 9] = 3.0, 0.2
    figure = figures.leader_heatmap(array / array.sum(1, keepdims=True), [f"i{arm}" for arm in range(50)], shown=4)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 4 and "i7" in labels and labels[-1] == "i9"
    with pytest.raises(ValueError, match="expected"):
        figures.leader_heatmap(array, ["a"])


@pytest.mark.parametrize(("rows", "count"), [(1, 3), (2, 9), (9, 3), (9, 9)])
def test_agent_figures_of_any_size(rows, count):
    rng = np.random.default_rng(0)
    names = LONG[:count]
    curve = rng.uniform(size=(rows, count))
    curve[0, 0] = np.nan
    shown = render(figures.validation(curve, names, baseline=0.25))
    assert "start  25.0%" in shown
    if rows > 1:
        assert f"mean of the agents  {curve[-1].mean():.1%}" in shown
    render(figures.reputations(100 + curve, np.where(curve > 0.5, curve, np.nan), names))
    games = rng.integers(0, 3, (count, count))
    render(figures.win_rates(games // 2, games % 2, games, names))
    render(figures.gaps(curve[:, 1], curve[:, 0]))


def test_everything_unknown():
    nan = np.full((2, 3), np.nan)
    render(figures.validation(nan, list("abc")))
    render(figures.reputations(nan, nan, list("abc")))
    render(figures.gaps(nan[:, 0], nan[:, 0]))
    render(figures.leader_weights(nan, list("abc")))
    render(figures.leader_heatmap(nan, list("abc")))
    render(figures.win_rates(*np.zeros((3, 2, 2)), ["a", "b"]))


def test_win_rates_are_of_the_row_agent():
    wins, draws = np.array([[0, 3], [1, 0]]), np.array([[0, 1], [1, 0]])
    figure = figures.win_rates(wins, draws, wins + wins.T + draws, ["a", "b"])
    cells = {item.get_position(): item.get_text() for item in figure.axes[0].texts}
    assert cells[(1, 0)] == "win 60%\ndraw 20%\nn=5" and cells[(0, 1)] == "win 20%\ndraw 20%\nn=5"
    with pytest.raises(ValueError, match="matrices"):
        figures.win_rates(wins, draws, draws, ["a"])


def test_labels_do_not_overlap():
    assert figures._spread([1.0, 1.0, 1.0], 0.5) == [0.5, 1.0, 1.5]
    placed = figures._spread([0.0, 5.0, 0.1, 4.9, 0.2], 1.0)
    assert np.diff(sorted(placed)).min() >= 1.0 - 1e-9
    assert [placed[index] for index in (0, 2, 4)] == sorted(placed[index] for index in (0, 2, 4))


def test_colours_and_markers_tell_nine_agents_apart():
    assert len(set(figures.COLOURS)) == len(set(figures.MARKERS)) == 9
