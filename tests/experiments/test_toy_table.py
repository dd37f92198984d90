"""The learning table: its statistics by formula, its figure, and that the toy pool learns from its judges."""

import subprocess
import sys

import numpy as np
import pytest

from experiments import prepare, settings, toy_table
from stackalign.algorithms import toy
from stackalign.lm import pool as lm_pool

GAINS = {"plain": (4.0, 8.0, 6.0), "plain_random": (-3.0, 1.0, -4.0), "nll": (7.0, 7.0)}


def rows():
    out = []
    for name, gains in GAINS.items():
        for seed, gain in enumerate(gains):
            tests = [0.5, 0.5 + gain / 50, 0.5 + gain / 100]
            out.append(
                {"seed": seed, "variant": name, "test": tests, "start": 0.5, "final": tests[-1], "best": tests[1]}
            )
    return out


def test_intervals_and_paired_differences():
    result = toy_table.table(rows())
    half = 4.302652729911275 * 2.0 / 3**0.5  # t(0.975, 2) · sd / √n of 4, 8, 6
    assert result["variants"]["plain"]["gain"] == pytest.approx((6.0, half))
    assert result["variants"]["plain"]["gain_at_best_validation"] == pytest.approx((12.0, 2 * half))
    assert result["differences"]["peers − random judge (DPO)"][0] == pytest.approx(8.0)
    paired = 12.706204736 * 8**0.5 / 2**0.5  # t(0.975, 1) · sd / √n of 3, −1
    assert result["differences"]["NLL of the chosen answer"] == pytest.approx((1.0, paired))
    text = toy_table.markdown(result)
    assert f"| DPO as in the paper | +6.0 ± {half:.1f} |" in text
    assert np.isnan(toy_table.interval([1.0])[1])


def test_figure_has_a_line_a_variant():
    axes = toy_table.figure(rows()).axes[0]
    assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == [
        toy_table.VARIANTS[name][0] for name in ("nll", "plain", "plain_random")
    ]


@pytest.mark.parametrize(("flag", "words"), [("--variants=plan", "plan"), ("--set=colour=red", "colour=red")])
def test_refusals(tmp_path, flag, words):
    command = [sys.executable, "-m", "experiments.toy_table", flag, f"--out_dir={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 1 and words in done.stderr and not (tmp_path / "out").exists()


def test_settings_keep_their_types():
    given = toy_table.parse_set(["learning_rate=1e-3", "duels=5", "leader=uniform", "remat=true"])
    assert given == {"learning_rate": 1e-3, "duels": 5, "leader": "uniform", "remat": True}


def test_the_pool_learns_from_its_judges_and_not_from_a_random_one(tmp_path):
    """Half a run of the toy preset on one seed; the table of the README has five whole ones."""
    split = toy.split(0)
    common = {"iterations": 4, "pretrain_steps": 900, "specialise_steps": 100}
    made, found = None, {}
    for name in ("plain", "plain_random"):
        chosen = settings.resolve("toy", {**common, **toy_table.VARIANTS[name][1]})
        made = made or prepare.toy_pool(chosen, split, tmp_path / "pool.npz", lm_pool.silent)
        found[name] = toy_table.play(chosen, *made, split, lm_pool.silent)
    again = prepare.toy_pool(chosen, split, tmp_path / "pool.npz", lm_pool.silent)
    for one, other in zip(*([*stacks["toy"][0]["q"].values()] for _, stacks in (made, again)), strict=True):
        np.testing.assert_array_equal(one, other)
    gains = {name: 100 * (row["final"] - row["start"]) for name, row in found.items()}
    assert gains["plain"] > 3.0, found
    assert gains["plain"] - gains["plain_random"] > 5.0, found
