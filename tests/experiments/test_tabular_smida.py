"""The tabular binary: its numbers against NumPy's, its verdicts on the theorems, its refusals, and what it writes.

All runs share one process of their own, so that each program is compiled once, and flags stay out of this process.
"""

import concurrent.futures
import contextlib
import io
import json
import multiprocessing
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib import image

from stackalign.runs import tabular_figures

SMALL = ("--contexts=3", "--leader_actions=4", "--follower_actions=4", "--num_steps=60")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def invoke(arguments: list[str], broken: bool = False, memory: float | None = None) -> Done:
    """Runs the binary in this process: with a step that is off by a hundredth, or with so many free bytes."""
    from absl import app
    from absl.testing import flagsaver

    from experiments import tabular_smida
    from stackalign.games import smida

    honest, available = smida.step, tabular_smida.available_memory

    def step(state, game, *, eta_leader, eta_follower):
        return honest(state, game, eta_leader=1.01 * eta_leader, eta_follower=eta_follower)

    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        smida.step = step if broken else honest
        tabular_smida.available_memory = available if memory is None else lambda: memory
        with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app.run(tabular_smida.main, ["tabular_smida", *arguments])
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        smida.step, tabular_smida.available_memory = honest, available
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def binary():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        yield lambda *arguments, **seams: process.submit(invoke, list(map(str, arguments)), **seams).result(timeout=120)


@pytest.fixture
def run(binary, tmp_path):
    """Runs the binary on a small number of steps; returns what it printed, results.json and solution.npz."""

    def one(*arguments, folder="out", code=0, **seams):
        out = tmp_path / folder
        done = binary(f"--out_dir={out}", *arguments, **seams)
        assert done.code == code, done.err
        assert "Traceback" not in done.err
        results = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
        return done, results, dict(np.load(out / "solution.npz"))

    return one


def game():
    """A game of the shape of SMALL, so that programs are shared."""
    shape, rng = (3, 4, 4), np.random.default_rng(0)

    def distribution(*size):
        weights = rng.uniform(0.1, 1.0, size=size)
        return weights / weights.sum(-1, keepdims=True)

    return {
        "utility": rng.normal(size=shape),
        "prior": distribution(shape[0]),
        "pi_ref": distribution(*shape[:2]),
        "omega_ref": distribution(*shape),
    }


def ensemble(members=3, contexts=3, actions=4):
    scores = np.random.default_rng(1).normal(size=(members, contexts, actions, actions))
    return 1.0 / (1.0 + np.exp(np.swapaxes(scores, 2, 3) - scores))


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_a_loaded_game_against_numpy(run, tmp_path):
    arrays, tau_leader, tau_follower = game(), 0.3, 0.2
    file = save(tmp_path / "game.npz", **arrays, tau_leader=0.7, tau_follower=tau_follower)
    done, results, solution = run(f"--game={file}", f"--tau_leader={tau_leader}", "--num_steps=60", "--check")
    u, prior = arrays["utility"], arrays["prior"]
    value = tau_follower * np.log(np.sum(arrays["omega_ref"] * np.exp(u / tau_follower), -1))
    weights = arrays["pi_ref"] * np.exp(-value / tau_leader)
    worth = prior @ (-tau_leader * np.log(weights.sum(-1)))
    pi = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(results["equilibrium"]["value"], worth, rtol=1e-13)
    np.testing.assert_allclose(solution["follower_value"], value, rtol=1e-12)
    np.testing.assert_allclose(np.exp(solution["log_pi_equilibrium"]), pi, rtol=1e-12)
    effective = np.exp(prior @ -np.sum(pi * np.log(pi), -1))
    np.testing.assert_allclose(results["equilibrium"]["effective_actions"]["leader"], effective, rtol=1e-12)

    # Algorithm 1, written out.
    eta_leader, eta_follower = 0.1 / tau_leader, 0.5 / tau_follower
    log_pi_ref, log_omega_ref = np.log(arrays["pi_ref"]), np.log(arrays["omega_ref"])
    log_pi, log_omega, kls = log_pi_ref, log_omega_ref, []

    def normalised(x):
        return x - np.log(np.sum(np.exp(x), -1, keepdims=True))

    for _ in range(61):
        kls.append(np.max(np.sum(np.exp(log_pi) * (log_pi - np.log(pi)), -1)))
        last = log_pi
        cost = np.sum(np.exp(log_omega) * (u - tau_follower * (log_omega - log_omega_ref)), -1)
        log_pi = normalised(0.9 * log_pi + 0.1 * log_pi_ref - eta_leader * cost)
        log_omega = normalised(0.5 * log_omega + 0.5 * log_omega_ref + eta_follower * u)
    np.testing.assert_allclose(solution["log_pi"], last, rtol=1e-11)
    np.testing.assert_allclose(results["trajectory"]["leader"], kls, rtol=1e-6, atol=1e-14)

    # Bound 15, and what it promises beforehand.
    spread = np.max(u.max((1, 2)) - u.min((1, 2)))
    bound = 0.9 ** np.arange(61) * spread / tau_leader * 5 / 4
    np.testing.assert_allclose(results["trajectory"]["bound_leader_simple"], bound, rtol=1e-12)
    promised = int(np.ceil(np.log(1e-6 / (spread / tau_leader * 5 / 4)) / np.log(0.9)))
    assert results["smida"]["steps_promised"] == promised
    assert f"value {worth:.10g}" in done.out and f"{promised} (bound 15)" in done.out
    assert all(row["holds"] for row in results["check"].values())


@pytest.mark.parametrize("precision", ["--x64", "--nox64"])
@pytest.mark.parametrize("arguments", [("--seed=1",), ("--utility=normal", "--seed=2"), ("--utility=jsd", "--seed=3")])
def test_theorems_hold_on_random_games(run, arguments, precision):
    done, results, _ = run(*SMALL, "--check", precision, *arguments)
    assert results["game"]["dtype"] == ("float64" if precision == "--x64" else "float32")
    assert len(results["check"]) == 16 and all(row["holds"] for row in results["check"].values())
    assert done.out.count("  holds  ") == 16 and "FAILS" not in done.out
    assert results["flags"]["check"] is True and results["environment"]["jax"]


def test_a_broken_step_is_found(run):
    done, results, _ = run(*SMALL, "--check", broken=True, code=1)
    failing = {name for name, row in results["check"].items() if not row["holds"]}
    assert "recursion of the Leader" in failing and "equality 17" not in failing
    assert done.err.splitlines()[-1].startswith("error: recursion of the Leader fails at step 0, context ")
    assert "  FAILS  recursion of the Leader" in done.out


def test_random_games_follow_their_flags(run):
    values = {
        name: run(*SMALL, *arguments)[1]["equilibrium"]["value"]
        for name, arguments in {
            "first": (), "again": (), "seed": ("--seed=1",), "single": ("--nox64",), 
            "uniform": ("--references=uniform",),
        }.items()
    }  # fmt: skip
    assert values["first"] == values["again"] != values["seed"]
    assert values["uniform"] != values["first"] == pytest.approx(values["single"], rel=1e-5)


@pytest.mark.parametrize("utility", ["variance", "decision_uncertainty", "preference", "targeted"])
def test_ensembles_become_utilities(run, tmp_path, utility):
    p = ensemble()
    mean, variance = p.mean(0), p.var(0)
    expected = {
        "variance": 4 * variance,
        "decision_uncertainty": np.minimum(mean, 1 - mean),
        "preference": 1 - mean,
        "targeted": variance + 2 * (1 - p[1]),
    }[utility]
    extra = ("--target_member=1", "--target_weight=2") if utility == "targeted" else ()
    file = save(tmp_path / "game.npz", ensemble=p)
    _, results, solution = run(f"--game={file}", f"--utility={utility}", "--num_steps=60", *extra)
    value = 0.1 * np.log(np.mean(np.exp(expected / 0.1), -1))
    np.testing.assert_allclose(solution["follower_value"], value, rtol=1e-12)
    assert results["game"] == {
        "source": f"{utility} of game.npz", "shape": [3, 4, 4], "dtype": "float64", "given": [],
    }  # fmt: skip


def test_contexts_stop_by_themselves(run):
    _, results, solution = run(*SMALL, "--tolerance=1e-3")
    found, trajectory = results["smida"], results["trajectory"]
    assert solution["gap"].max() <= 1e-3 and found["final"]["gap"] == solution["gap"].max()
    assert found["fewest_steps"] == solution["step"].min() < found["most_steps"] == solution["step"].max() < 60
    known = [value is not None for value in trajectory["leader"]]
    assert known == [step <= found["most_steps"] for step in range(61)]
    assert found["steps_to_accuracy"] is None  # a context stopped before its divergence was that small


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_blocks_of_a_file_equal_the_whole(run, tmp_path, dtype):
    np.save(tmp_path / "game.npy", game()["utility"].astype(dtype))
    found = [
        run(f"--game={tmp_path / 'game.npy'}", "--num_steps=60", *extra)
        for extra in ((), ("--block_contexts=2",), ("--block_contexts=100",))
    ]
    _, whole, arrays = found[0]
    assert whole["game"]["dtype"] == "float64"
    for done, results, blocks in found[1:]:
        assert "solve: 3/3 contexts" in done.err
        for key, array in arrays.items():
            np.testing.assert_allclose(blocks[key], array, rtol=1e-12, atol=1e-15, err_msg=key)
        for part in ("equilibrium", "constants", "trajectory"):
            for key, value in whole[part].items():
                if key == "effective_actions":
                    assert results[part][key] == pytest.approx(value, rel=1e-12)
                else:
                    one, other = (np.array(x, float) for x in (results[part][key], value))
                    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15, err_msg=key)


def test_solvers_are_compared(run, tmp_path):
    done, results, _ = run(*SMALL, "--compare", "--accuracy=1e-3")
    solvers = results["compare"]
    assert list(solvers) == ["SMIDA", "gradient descent-ascent", "extragradient", "best response"]
    assert all(name in done.out for name in solvers)
    gaps = {name: np.array(row["gap"]) for name, row in solvers.items()}
    assert all(gap.shape == (61,) and gap[0] == gaps["SMIDA"][0] for gap in gaps.values())
    np.testing.assert_allclose(gaps["SMIDA"][-1], results["smida"]["mean_gap"], rtol=1e-6)
    assert (
        gaps["best response"][2] < 1e-15 < gaps["best response"][1] and solvers["best response"]["eta_leader"] is None
    )
    assert solvers["best response"]["steps_to_accuracy"] == 2
    assert solvers["SMIDA"]["steps_to_accuracy"] == 1 + np.flatnonzero(gaps["SMIDA"] > 1e-3)[-1]

    # The grid is worth its while: other step sizes of it are no better. Given ones are used as they are.
    tuned = solvers["gradient descent-ascent"]
    assert tuned["step_sizes"].startswith("best final gap of 49 pairs")
    pair = [f"--rival_eta_leader={tuned['eta_leader'] / 4}", f"--rival_eta_follower={tuned['eta_follower'] / 4}"]
    _, slower, _ = run(*SMALL, "--compare", *pair)
    given = slower["compare"]["gradient descent-ascent"]
    assert given["step_sizes"] == "from flags" and given["eta_leader"] == tuned["eta_leader"] / 4
    assert tuned["final_gap"] < given["final_gap"] < gaps["SMIDA"][0]

    # Figures have been drawn; the next run without --compare takes the one off that would be stale, and nothing else.
    out = tmp_path / "out"
    (out / "notes.txt").write_text("mine")
    for name in ("divergences.png", "solvers.png"):
        pixels = image.imread(out / name)
        assert min(pixels.shape[:2]) > 300 and pixels[..., :3].std() > 0.02
    run(*SMALL)
    assert sorted(path.name for path in out.iterdir()) == [
        "divergences.png", "notes.txt", "results.json", "solution.npz",
    ]  # fmt: skip


def refused(binary, tmp_path, *arguments, **seams) -> str:
    done = binary(f"--out_dir={tmp_path / 'out'}", *arguments, **seams)
    assert done.code == 1 and "Traceback" not in done.err
    assert not (tmp_path / "out").exists(), "nothing may be computed or written"
    return done.err + done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("extra",), ("unexpected argument 'extra'",)),
        (("--contexts=0",), ("--contexts", "positive")),
        (("--utility=entropy",), ("--utility", "jsd")),
        (("--tau_leader=0",), ("--tau_leader", "positive")),
        (("--tau_follower=nan",), ("--tau_follower", "positive")),
        (("--tau_leader=-1",), ("--tau_leader", "positive")),
        (("--eta_leader=6",), ("condition 6", "eta_leader * tau_leader = 0.6", "lower eta_leader")),
        (("--eta_follower=11",), ("condition 6", "eta_follower * tau_follower = 1.1", "lower eta_follower")),
        (("--eta_leader=0",), ("condition 6", "eta_leader")),
        (("--scale=-1",), ("--scale=-1", "positive")),
        (("--accuracy=0",), ("--accuracy=0", "positive")),
        (("--tolerance=-1",), ("--tolerance=-1",)),
        (("--tolerance=nan",), ("--tolerance=nan",)),
        (("--members=3",), ("--members", "variance")),
        (("--utility=variance", "--leader_actions=4"), ("--leader_actions=4", "--follower_actions=16")),
        (("--utility=jsd", "--target_member=1"), ("--target_member", "--utility=targeted")),
        (("--utility=targeted", "--target_member=5"), ("--target_member=5", "5 members")),
        (("--utility=targeted", "--target_weight=inf"), ("--target_weight", "finite")),
        (("--block_contexts=4",), ("--block_contexts", "--game=FILE.npy")),
        (("--rival_eta_leader=1", "--rival_eta_follower=1"), ("--compare",)),
        (("--compare", "--rival_eta_leader=1"), ("--rival_eta_follower",)),
        (("--game=nowhere.npz",), ("--game=nowhere.npz", "no such file")),
        (("--game=game.csv",), ("--game=game.csv", ".npz or .npy")),
        (("--game=game.npz", "--contexts=3"), ("--contexts", "random", "--game=game.npz")),
        (("--game=game.npy", "--block_contexts=2", "--check"), ("--check", "--block_contexts")),
    ],
)
def test_flags_that_cannot_work_are_refused(binary, tmp_path, arguments, words):
    message = refused(binary, tmp_path, *arguments)
    assert all(word in message for word in words), message


def altered(**changes):
    arrays = {**game(), **changes}
    return {key: value for key, value in arrays.items() if value is not None}


def spoiled(name, index, value):
    arrays = game()
    arrays[name][index] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (altered(utility=None), ("'utility'", "'ensemble'")),
        (altered(ensemble=ensemble()), ("one of 'utility' and 'ensemble'",)),
        (altered(omega=np.ones(3)), ("unknown 'omega'", "omega_ref")),
        (altered(utility=np.ones((3, 4))), ("utility", "[contexts, Leader actions, Follower actions]", "[3, 4]")),
        (altered(utility=np.ones((0, 4, 4))), ("utility", "[0, 4, 4]")),
        (altered(utility=np.full((3, 4, 4), "a")), ("utility", "numbers")),
        (altered(utility=np.full((3, 4, 4), None)), ("'utility' can't be read",)),
        (spoiled("utility", (1, 2, 3), np.nan), ("utility[1, 2, 3] = nan is not finite",)),
        (spoiled("prior", 1, 0.0), ("prior", "full support", "[1]")),
        (altered(prior=np.ones(2) / 2), ("prior", "[3]")),
        (altered(prior=np.array(["a", "b", "c"])), ("'prior'", "numbers")),
        (altered(pi_ref=np.ones((3, 5)) / 5), ("pi_ref", "[3, 4]")),
        (altered(omega_ref=np.ones((3, 4, 4))), ("omega_ref", "sum to 1")),
        (altered(log_pi_ref=np.full(4, np.log(0.25))), ("pi_ref or log_pi_ref",)),
        (altered(tau_leader=-0.1), ("tau_leader", "positive", "-0.1")),
        (altered(tau_follower=np.ones(3)), ("tau_follower", "one positive number")),
    ],
)  # fmt: skip
def test_broken_games_are_refused(binary, tmp_path, arrays, words):
    file = save(tmp_path / "game.npz", **arrays)
    message = refused(binary, tmp_path, f"--game={file}")
    assert all(word in message for word in (f"error: --game={file}: ", *words)), message
    assert len([line for line in message.splitlines() if line]) == 1


@pytest.mark.parametrize(
    ("arguments", "spoil", "words"),
    [
        ((), None, ("give --utility", "variance")),
        (("--utility=normal",), None, ("give --utility", "variance")),
        (("--utility=targeted", "--target_member=3"), None, ("--target_member=3", "3 members")),
        (("--utility=jsd",), (0, 1, 2, 2), ("ensemble[0, 1, 2, 2]", "antisymmetric")),
    ],
)
def test_broken_ensembles_are_refused(binary, tmp_path, arguments, spoil, words):
    p = ensemble()
    if spoil:
        p[spoil] = 0.75
    message = refused(binary, tmp_path, f"--game={save(tmp_path / 'game.npz', ensemble=p)}", *arguments)
    assert all(word in message for word in ("game.npz", *words)), message


def test_broken_files_are_refused(binary, tmp_path):
    utility = game()["utility"]
    utility[2, 3, 1] = np.inf
    np.save(tmp_path / "game.npy", utility)
    whole, blocks = (
        refused(binary, tmp_path, f"--game={tmp_path / 'game.npy'}", *b) for b in ((), ("--block_contexts=2",))
    )
    assert "utility[2, 3, 1] = inf is not finite" in whole and whole == blocks
    assert "--utility" in refused(binary, tmp_path, f"--game={tmp_path / 'game.npy'}", "--utility=jsd")
    data = (tmp_path / "game.npy").read_bytes()
    (tmp_path / "torn.npy").write_bytes(data[:-8])
    assert "torn.npy" in refused(binary, tmp_path, f"--game={tmp_path / 'torn.npy'}")
    np.save(tmp_path / "flat.npy", utility[0])
    assert "found [4, 4]" in refused(binary, tmp_path, f"--game={tmp_path / 'flat.npy'}")
    (tmp_path / "text.npz").write_text("utility")
    assert "not an .npz archive" in refused(binary, tmp_path, f"--game={tmp_path / 'text.npz'}")
    file = save(tmp_path / "whole.npz", utility=np.ones((3, 4, 4)))
    data = bytearray(file.read_bytes())
    data[200] ^= 255
    file.write_bytes(data)
    assert "whole.npz" in refused(binary, tmp_path, f"--game={file}")


def test_what_does_not_fit_in_memory_is_refused(binary, tmp_path):
    """The default job takes 16 times the utility, --check 32 times."""
    size = 8 * 64 * 16 * 16
    message = refused(binary, tmp_path, "--check", "--num_steps=1", memory=31 * size)
    assert all(word in message for word in ("--check stores the Follower", "[64, 16, 16]", "GiB", "--nox64")), message
    assert "solving takes" in refused(binary, tmp_path, memory=15 * size)
    enormous = ("--contexts=1000000", "--leader_actions=10000", "--follower_actions=10000")
    assert "fewer contexts" in refused(binary, tmp_path, *enormous)


def test_a_folder_that_cannot_be_made_is_refused(binary, tmp_path):
    (tmp_path / "file").touch()
    done = binary(f"--out_dir={tmp_path / 'file'}", *SMALL)
    assert done.code == 1 and done.err.startswith("error: ") and str(tmp_path / "file") in done.err


def test_help_names_commands_and_files():
    command = [sys.executable, "-m", "experiments.tabular_smida", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    for words in ("python -m experiments.tabular_smida --check", "--game=FILE.npz", "results.json", "--eta_leader"):
        assert words in shown.stdout + shown.stderr


def test_curves_of_the_figures():
    steps = np.arange(5)
    measured = {name: 0.1 ** (2.0 * steps) for name in ("leader", "leader_reverse", "follower")}
    measured["follower_reverse"] = np.array([1.0, 0.1, 0.0, np.nan, np.nan])
    promised = {name: 0.5**steps for name in ("leader", "leader_simple", "follower")}
    figure = tabular_figures.divergences(steps, measured, promised, {"leader": 1e-20, "follower": 1e-20})
    top, bottom = figure.axes
    assert [line.get_label() for line in bottom.lines][:2] == ["bound 15", "bound 14"]
    assert len(top.lines) == 3 and top.get_yscale() == bottom.get_yscale() == "log"
    np.testing.assert_array_equal(top.lines[2].get_ydata(), [1.0, 0.1, np.nan, np.nan, np.nan])
    assert top.get_ylim()[0] < 1e-20 < 1.0 < top.get_ylim()[1]

    races = {
        "one": tabular_figures.Race(0.1**steps, 2e-3),
        "two": tabular_figures.Race(np.array([1.0, 0, 0, 0, 0]), 1e-3),
    }
    left, right = tabular_figures.solvers(races, floor=1e-9).axes
    np.testing.assert_allclose(right.lines[0].get_xdata(), 2.0 * steps)
    np.testing.assert_array_equal(left.lines[0].get_ydata(), 0.1**steps)
    assert left.lines[1].get_ydata()[1:] == pytest.approx(1e-9 / 30.0)
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["one", "two", "rounding"]
