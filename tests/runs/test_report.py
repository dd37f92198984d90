import json
import math

import numpy as np
import pytest
import synthetic

from stackalign.runs import records, report

AGENTS = ["addition", "reverse", "sort", "count"]
FIGURES = {"validation", "leader_weights", "leader_heatmap", "reputations", "win_rates", "gaps"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run"
    metrics, duels = synthetic.write_run(path, AGENTS)
    check = {"addition": {"accuracy": 0.9, "interval": [0.8, 0.95], "at_chance": False, "pairs": 70}}
    check["sort"] = {"accuracy": 0.51, "interval": [0.4, 0.62], "at_chance": True, "pairs": 70}
    (path / "judge_check.json").write_text(json.dumps({"judges": check}))
    return path, metrics, duels, report.build(path)


def edit(tmp_path, change):
    """The summary of a synthetic run whose lines of metrics `change` altered."""
    path = tmp_path / "run"
    metrics, _ = synthetic.write_run(path, AGENTS)
    for row in metrics:
        change(row)
    records.write(path / "metrics.jsonl", metrics)
    return report.summarise(path)


def test_the_summary_is_written(built):
    path, _, _, summary = built
    assert json.loads((path / "report" / "summary.json").read_text()) == summary
    assert {file.stem for file in (path / "report").glob("*.png")} == FIGURES


def test_validation(built):
    _, metrics, _, summary = built
    means = [np.mean(list(row["validation"].values())) for row in metrics]
    assert summary["iterations"] == 3 and summary["agents"] == AGENTS
    assert [row["validation"] for row in summary["by_iteration"]] == [row["validation"] for row in metrics]
    assert np.allclose([row["validation_mean"] for row in summary["by_iteration"]], means)
    best = int(np.argmax(means))
    assert summary["best_iteration"] == best
    assert math.isclose(summary["best_gain"], means[best] - means[0])
    assert math.isclose(summary["final_gain"], means[-1] - means[0])
    of_best = metrics[best]["validation"]
    assert summary["best_agent"] == max(of_best, key=of_best.get)
    assert summary["best_agent_validation"] == max(of_best.values())


def test_calls_and_seconds_are_sums(built):
    summary = built[3]
    num_iterations, num_duels, num_agents = 3, 8, 4
    assert summary["calls"] == {
        "generations": num_iterations * 2 * num_duels,
        "judgements": num_iterations * 2 * num_duels * (num_agents - 2),
        "generations_formula": num_iterations * 2 * num_duels,
        "judgements_formula": num_iterations * 2 * num_duels * (num_agents - 2),
        "paper_formula": num_iterations * num_duels * num_agents,
    }
    assert summary["seconds"] == {"generate": 3 * 1.25, "judge": 0.5 * (1 + 2 + 3)}
    assert summary["seconds_total"] == 3.75 + 3.0


def test_parse_failures_by_judge(built):
    _, _, duels, summary = built
    for judge in AGENTS:
        attempts = sum(2 for duel in duels if judge in duel["judges"])
        failed = 3 if judge == AGENTS[0] else 0
        row = summary["parse_failures"][judge]
        assert row["failures"] == failed
        assert math.isclose(row["attempts"], attempts) and math.isclose(row["rate"], failed / attempts)
    assert math.isclose(summary["parse_failure_rate"], 3 / summary["calls"]["judgements"])


def test_win_rates(built):
    _, _, duels, summary = built
    rates = summary["win_rates"]
    for row, a in enumerate(AGENTS):
        for column, b in enumerate(AGENTS):
            met = [duel for duel in duels if duel["valid"] and set(duel["models"]) == {a, b} and a != b]
            mine = [duel["scores"][duel["models"].index(a)] for duel in met]
            other = [duel["scores"][duel["models"].index(b)] for duel in met]
            assert rates["games"][row][column] == len(met)
            assert rates["wins"][row][column] == sum(x > y for x, y in zip(mine, other, strict=True))
            assert rates["draws"][row][column] == sum(x == y for x, y in zip(mine, other, strict=True))
    assert np.sum(rates["games"]) == 2 * (len(duels) - 3)  # one duel an iteration has no score


def test_leader_ends(built):
    _, metrics, _, summary = built
    weights = np.exp(metrics[-1]["leader"]["log_weights"]) * 16
    order = np.argsort(-weights)
    instructions = synthetic.instruction_rows(16)
    for row, arm in zip(summary["leader"]["top"], order[:5], strict=True):
        assert row["id"] == instructions[arm]["id"] and row["prompt"] == instructions[arm]["prompt"]
        assert math.isclose(row["weight"], weights[arm], rel_tol=1e-6)
        assert math.isclose(row["probability"], 0.8 * weights[arm] + 0.2, rel_tol=1e-6)
    assert [row["id"] for row in summary["leader"]["bottom"]] == [f"add-{arm}" for arm in order[::-1][:5]]


def test_the_rest_is_the_last_line(built):
    _, metrics, duels, summary = built
    for field in ("reputations", "deviations", "deviation_floor_share", "bradley_terry"):
        assert summary[field] == metrics[-1][field]
    assert summary["type_token_ratio"] == dict.fromkeys(AGENTS, 0.4)
    assert summary["response_tokens"] == dict.fromkeys(AGENTS, 12.5)
    assert [row["pairs"] for row in summary["by_iteration"]] == [None, 6, 6, 6]
    assert [row["realised_gap"] for row in summary["by_iteration"][1:]] == [row["realised_gap"] for row in metrics[1:]]
    assert summary["duels"] == len(duels) == 24
    assert summary["peak_memory_bytes"] is None
    assert summary["judge_check"]["sort"] == {"accuracy": 0.51, "interval": [0.4, 0.62], "at_chance": True}


def test_the_page(built):
    path, _, _, summary = built
    page = (path / "report" / "report.md").read_text()
    assert page.splitlines()[2] == f"**{summary['verdict']}**"
    assert summary["verdict"].startswith("Mean validation accuracy rose from ")
    for warning in summary["warnings"]:
        assert f"> **Warning:** {warning}" in page
    for name in FIGURES:
        assert f"]({name}.png)" in page
    assert "python -m experiments.align --algorithm=align --seed=3 --peer --run_dir=NEW_FOLDER" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert any("What is 12 + 24? Answer with the number \\| only." in line for line in tables)
    for line in tables:  # a prompt's bar or line end would break its row
        assert line.endswith("|")


def test_a_second_build_is_the_same(built):
    path, _, _, summary = built
    before = {file.name: file.read_bytes() for file in (path / "report").iterdir()}
    assert report.build(path) == summary
    assert {file.name: file.read_bytes() for file in (path / "report").iterdir()} == before


def test_warnings(built):
    warnings = built[3]["warnings"]
    assert any(warning.startswith("judges at chance") and "sort" in warning for warning in warnings)
    assert any("replies of judge addition" in warning for warning in warnings)
    assert len(warnings) == 2


def test_warnings_of_a_bad_run(tmp_path):
    def worsen(row):
        row["validation_mean"] = 0.5 - 0.1 * row["iteration"]
        if row["iteration"]:
            row |= {"pairs": 0, "ties": 7, "deviation_floor_share": 0.75, "parse_failures": {}}

    summary = edit(tmp_path, worsen)
    assert summary["best_iteration"] == 0 and math.isclose(summary["final_gain"], -0.3)
    assert summary["verdict"].startswith("Mean validation accuracy fell from 50.0% to 20.0% (-30.0 points)")
    assert summary["warnings"] == [
        "validation did not rise: -30.0 points from start to end",
        "no preference pair in the whole run: every duel was a tie or had no score",
        "75% of the deviations are on their floor: reputations hardly move any more",
    ]


def test_one_empty_iteration_is_named(tmp_path):
    def empty(row):
        if row["iteration"] == 2:
            row["pairs"] = 0

    assert "no preference pair in iteration 2: all ties or without score" in edit(tmp_path, empty)["warnings"]


@pytest.mark.parametrize("num_iterations", [0, 1])
def test_short_runs(tmp_path, num_iterations):
    synthetic.write_run(tmp_path / "run", AGENTS[:3], num_iterations=num_iterations)
    summary = report.build(tmp_path / "run")
    assert summary["iterations"] == num_iterations
    drawn = {file.stem for file in (tmp_path / "run" / "report").glob("*.png")}
    assert drawn == (FIGURES if num_iterations else FIGURES - {"win_rates", "gaps"})
    if num_iterations == 0:
        assert "no iteration is complete yet" in summary["verdict"] and summary["warnings"] == []


def test_a_run_that_records_little(tmp_path):
    def strip(row):
        for field in set(row) - {"iteration"}:
            del row[field]

    summary = edit(tmp_path, strip)
    full = edit(tmp_path / "full", lambda row: None)
    assert summary.keys() == full.keys()  # the field names are the same for every run
    assert summary["final_validation"] is None and "validation was never measured" in summary["warnings"]
    assert summary["verdict"] == "The run recorded no validation accuracy."
    report.build(tmp_path / "run")
    assert {file.stem for file in (tmp_path / "run" / "report").glob("*.png")} == {"win_rates"}  # from the duels


def test_missing_values_test_split_and_peak_memory(tmp_path):
    def blank(row):
        row["validation"]["sort"] = None
        row["validation_mean"] = None

    edit(tmp_path, blank)
    accuracies = {name: (index + 1) / 8 for index, name in enumerate(AGENTS)}
    test = {"questions": 8, "best": {"iteration": 1, "mean": 0.5, "by_agent": accuracies}}
    results = {"peak_memory_bytes": 2**30 + 3, "programs": {"gradient": 2, "all": 31}, "test": test}
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    summary = report.summarise(tmp_path / "run")
    known = [value for value in summary["by_iteration"][0]["validation"].values() if value is not None]
    assert math.isclose(summary["start_validation"], sum(known) / 3)
    assert summary["peak_memory_bytes"] == 2**30 + 3
    assert summary["programs"] == {"gradient": 2, "all": 31}
    assert summary["best_agent_test"] == accuracies[summary["best_agent"]]
    report.build(tmp_path / "run")
    assert "Peak memory: 1.00 GiB." in (tmp_path / "run" / "report" / "report.md").read_text()


def test_a_run_at_work_can_be_reported(tmp_path):
    synthetic.write_run(tmp_path / "run", AGENTS)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"iteration": 4, "vali')
    assert report.build(tmp_path / "run")["iterations"] == 3


def test_instructions_that_do_not_fit_the_leader(tmp_path):
    synthetic.write_run(tmp_path / "run", AGENTS)
    (tmp_path / "run" / "instructions.jsonl").unlink()
    summary = report.build(tmp_path / "run")
    assert any("instructions.jsonl" in warning for warning in summary["warnings"])
    assert summary["leader"]["top"][0]["prompt"] is None


def test_nothing_to_report(tmp_path):
    with pytest.raises(FileNotFoundError):
        report.build(tmp_path)
    path = tmp_path / "run"
    synthetic.write_run(path, AGENTS)
    (path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="no complete line"):
        report.build(path)
    assert not (path / "report").exists()


def test_the_command_comes_from_the_configuration():
    toy = "python -m experiments.align --preset=toy"
    assert report._command({"command": toy}) == report._command({"command": toy.split()}) == toy
    config = {"preset": "toy", "peer": False, "sizes": [1, 2], "text": "a b", "none": None}
    elsewhere = {"resume": True, "run_dir": "x", "environment": {"jax": "1"}}
    assert report._command(config | elsewhere) == (
        "python -m experiments.align --preset=toy --nopeer --sizes=1,2 '--text=a b' --run_dir=NEW_FOLDER"
    )
