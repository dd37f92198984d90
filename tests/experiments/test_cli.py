"""The alignment binary at its edges: presets, overrides, refusals before any work, the plan, and a user's own pool."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import settings


def cli(*arguments: str, timeout: int = 300, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.align", *arguments]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=environment
    )


def refused(preset="smollm2", **given) -> str:
    with pytest.raises(ValueError) as caught:
        settings.resolve(preset, given)
    return str(caught.value)


def test_presets_resolve_and_paper_numbers_stand():
    for preset in settings.PRESETS:
        given = {"pool": "a/x,b/y,c/z"} if preset == "paper_dpo" else {}
        chosen = settings.resolve(preset, given)
        assert set(settings.PAPER) | {"preset"} == set(chosen)
        settings.align_config(chosen)
    paper = settings.align_config(settings.resolve("paper_dpo", {"pool": "a/x,b/y,c/z"}))
    assert (paper.iterations, paper.duels, paper.sampling) == (8, 64, (256, 0.7, 0.9, 0))
    assert (paper.train.learning_rate, paper.train.beta, paper.train.batch_size, paper.train.epochs) == (
        1e-6,
        0.1,
        16,
        1,
    )
    shape = settings.lora_config(settings.resolve("paper_dpo", {"pool": "a/x,b/y,c/z"}))
    assert (shape.rank, shape.alpha, shape.dropout, shape.targets) == (64, 16.0, 0.1, ("q", "k", "v", "o"))


def test_flags_override_presets():
    chosen = settings.resolve("toy", {"duels": 5, "leader": "uniform"})
    assert (chosen["duels"], chosen["leader"], chosen["iterations"]) == (5, "uniform", 8)


@pytest.mark.parametrize(
    ("preset", "given", "words"),
    [
        ("smollm2", {"pool": "a/x,b/y"}, ("two models", "--judge=verifier", "--judge_endpoint")),
        ("smollm2", {"pool": "a/x,,b/y"}, ("empty entry",)),
        ("smollm2", {"judge_endpoint": "http://x/v1"}, ("--judge_model",)),
        ("smollm2", {"judge_endpoint": "http://x/v1", "judge_model": "j", "judge": "digits"}, ("--judge=digits",)),
        ("smollm2", {"judge_model": "j"}, ("--judge_endpoint",)),
        ("smollm2", {"on_parse_failure": "five"}, ("--on_parse_failure", "likelihood")),
        ("smollm2", {"leader": "uniform", "leader_eta": 1.0}, ("--leader_eta",)),
        ("smollm2", {"judge": "verifier", "weighting": "mean"}, ("--weighting",)),
        ("smollm2", {"duels": 4, "duels_per_round": 5}, ("--duels_per_round",)),
        ("smollm2", {"top_p": 0.0}, ("--top_p",)),
        ("smollm2", {"top_k": -1}, ("--top_k",)),
        ("smollm2", {"learning_rate": 0.0}, ("--learning_rate",)),
        ("smollm2", {"iterations": 0}, ("--iterations",)),
        ("smollm2", {"lora_targets": "q,z"}, ("z",)),
        ("smollm2", {"test_instructions": "x.jsonl"}, ("--instructions",)),
        ("smollm2", {"pretrain_steps": 5}, ("--preset=toy",)),
        ("toy", {"pool": "smollm2"}, ("--pool", "--preset=toy")),
        ("toy", {"judge": "generate"}, ("--judge=generate",)),
        ("paper_dpo", {}, ("--pool",)),
        ("smollm2", {"train": "some"}, ("--train=some", "full")),
        ("smollm2", {"train": "full"}, ("--train=full", "careful, terse", "smollm2", "--pool", "--train=lora")),
        ("smollm2", {"train": "full", "pool": "a/x,b/y,a/x"}, ("x_1, x_2", "'a/x'")),
        ("smollm2", {"train": "full", "pool": "a/x,b/y,c/z", "lora_rank": 8}, ("--lora_rank", "--train=full")),
        ("toy", {"train": "full"}, ("--train=full", "--preset=toy")),
        ("nothing", {}, ("smollm2", "toy", "paper_dpo")),
    ],
)
def test_combinations_that_cannot_work_are_refused(preset, given, words):
    message = refused(preset, **given)
    assert all(word in message for word in words), message


def test_two_models_with_an_external_judge_are_fine():
    settings.resolve("smollm2", {"pool": "a/x,b/y", "judge": "verifier"})
    chosen = settings.resolve("smollm2", {"pool": "a/x,b/y", "judge_endpoint": "http://x/v1", "judge_model": "j"})
    assert chosen["judge"] == "endpoint"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("[", "not JSON"),
        ([], "list of agents"),
        ([1], "agent 1"),
        ([{"name": "a"}], "'base'"),
        ([{"name": "", "base": "x"}], "'name'"),
        ([{"name": "a", "base": "x", "adaptor": "y"}], "adaptor"),
        ([{"name": "a", "base": "x", "system_prompt": 3}], "'system_prompt'"),
        ([{"name": "a", "base": "x"}, {"name": "a", "base": "y"}], "more than once"),
    ],
)
def test_agent_files_are_checked(tmp_path, rows, words):
    file = tmp_path / "pool.json"
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    assert words in refused(pool=str(file))


def test_a_full_fine_tune_takes_no_adapter(tmp_path):
    file = tmp_path / "pool.json"
    file.write_text(json.dumps([{"name": name, "base": f"b/{name}", "adapter": "folder"} for name in "xyz"]))
    assert all(word in refused(pool=str(file), train="full") for word in ("'x'", "adapter", "experiments.export"))


def test_agents_of_a_list_get_different_names():
    specs = settings.agents({"pool": "models/a,other/a,models/b"})
    assert [spec.name for spec in specs] == ["a_1", "a_2", "b"]


def test_help_reads_and_names_every_setting():
    shown = cli("--help")
    text = shown.stdout + shown.stderr
    assert "python -m experiments.align --preset=toy" in text
    assert all(f"--{name}" in text or f"--[no]{name}" in text for name in settings.PAPER)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', ("line 2", "'a'")),
        ('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": \n', ("line 2",)),
        ('{"id": "a", "prompt": "  "}\n', ("line 1", "prompt")),
    ],
)
def test_broken_instruction_files_stop_before_anything_is_made(tmp_path, text, words):
    file = tmp_path / "instructions.jsonl"
    file.write_text(text)
    result = cli(f"--instructions={file}", f"--run_dir={tmp_path / 'run'}")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert all(word in result.stderr for word in (*words, "instructions.jsonl")), result.stderr
    assert not (tmp_path / "run").exists()


def test_too_many_instructions_are_refused_before_a_pool_is_made(tmp_path):
    result = cli("--preset=toy", "--num_instructions=1000", f"--run_dir={tmp_path / 'run'}", timeout=60)
    assert result.returncode == 1 and "1000" in result.stderr and "480" in result.stderr
    assert not (tmp_path / "run" / "pool.npz").exists() and not (tmp_path / "run" / "config.json").exists()


def test_a_full_run_folder_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = cli("--preset=toy", f"--run_dir={tmp_path}")
    assert result.returncode == 1 and "--resume" in result.stderr and "Traceback" not in result.stderr
    result = cli("--resume", f"--run_dir={tmp_path}")
    assert result.returncode == 1 and "no run" in result.stderr
    result = cli("--resume")
    assert result.returncode == 1 and "--run_dir" in result.stderr


def test_own_pool_own_instructions_and_trained_adapters_come_back(tiny_model, tmp_path):
    instructions = tmp_path / "mine.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"Say the number {i}.", "answer": str(i)} for i in range(10)]
    instructions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = tmp_path / "pool.json"
    agents = [
        {"name": f"agent_{i}", "base": str(tiny_model), "system_prompt": f"You are number {i}."} for i in range(3)
    ]
    pool.write_text(json.dumps(agents))
    small = [
        "--iterations=1",
        "--duels=4",
        "--num_instructions=4",
        "--max_new_tokens=4",
        "--judge_check=0",
        "--lora_rank=2",
    ]
    first = cli(f"--pool={pool}", f"--instructions={instructions}", f"--run_dir={tmp_path / 'one'}", *small)
    assert first.returncode == 0, first.stderr
    for name in ("config.json", "duels.jsonl", "metrics.jsonl", "report/summary.json", "report/report.md"):
        assert (tmp_path / "one" / name).exists()
    trained = tmp_path / "one" / "agents" / "final" / "agent_0"
    assert any(
        np.abs(t).max() > 0 for n, t in load_file(trained / "adapter_model.safetensors").items() if "lora_B" in n
    )
    counted = json.loads((tmp_path / "one" / "report" / "summary.json").read_text())["programs"]
    assert counted["gradient"] == counted["apply"] == 1 and counted["all"] > counted["generate"] > 0
    # A trained adapter is an agent of the next pool; a judge that generates fails to parse and is counted.
    agents[0]["adapter"] = str(trained)
    pool.write_text(json.dumps(agents))
    second = cli(
        f"--pool={pool}", f"--instructions={instructions}", f"--run_dir={tmp_path / 'two'}", "--judge=generate", *small
    )
    assert second.returncode == 0, second.stderr
    summary = json.loads((tmp_path / "two" / "report" / "summary.json").read_text())
    assert sum(row["failures"] for row in summary["parse_failures"].values()) > 0
    assert any("parse" in warning or "score" in warning for warning in summary["warnings"])
    wrong = cli(f"--pool={pool}", f"--run_dir={tmp_path / 'three'}", *small[:-1], "--lora_rank=1")
    assert wrong.returncode == 1 and "--lora_rank=2" in wrong.stderr and "Traceback" not in wrong.stderr


def test_two_models_with_an_endpoint_judge(tiny_model, tmp_path):
    """The judge sees the paper's prompt and its replies become the scores; a second run is served from the cache."""
    prompts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompts.append(body["messages"][-1]["content"])
            score = 1 + len(prompts[-1]) % 9
            reply = {"choices": [{"message": {"content": f'{{"score": {score}}}'}, "finish_reason": "stop"}]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [
        f"--pool={tiny_model},{tiny_model}", f"--judge_endpoint=http://127.0.0.1:{server.server_port}/v1",
        "--judge_model=judge", "--iterations=1", "--duels=4", "--num_instructions=4", "--max_new_tokens=4",
        "--judge_check=0", "--lora_rank=2",
    ]  # fmt: skip
    try:
        for name in ("one", "two"):
            result = cli(*flags, f"--run_dir={tmp_path / name}", env={"STACKALIGN_CACHE": str(tmp_path / "cache")})
            assert result.returncode == 0, result.stderr
            if name == "one":
                asked = len(prompts)
    finally:
        server.shutdown()
        server.server_close()
    assert 0 < asked == len(prompts) <= 8
    assert all("Output ONLY a JSON object" in prompt for prompt in prompts)
    for line in (tmp_path / "one" / "duels.jsonl").read_text().splitlines():
        duel = json.loads(line)
        assert list(duel["judges"]) == ["judge"] and duel["scores"] == duel["judges"]["judge"]


def test_damaged_checkpoints_are_refused_by_name(tiny_model, tmp_path):
    def copy(name, change=None, **fields):
        folder = tmp_path / name
        folder.mkdir()
        for file in tiny_model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        if change:
            tensors = change(load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors")
        return folder

    def without(tensors):
        return {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}

    cases = {
        copy("missing", without): "model.layers.1.mlp.up_proj.weight",
        copy("foreign", architectures=["MambaForCausalLM"], model_type="mamba"): "mamba",
    }
    smaller = copy("smaller", vocab_size=200)
    tensors = load_file(smaller / "model.safetensors")
    embed = "model.embed_tokens.weight"
    save_file({**tensors, embed: tensors[embed][:200].copy()}, smaller / "model.safetensors")
    cases[smaller] = "the embedding 200 rows"
    short = copy("short")
    whole = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    cases[short] = "model.safetensors"
    for folder, words in cases.items():
        result = cli(
            f"--pool={folder},{folder},{folder}", f"--run_dir={tmp_path / 'run'}" + folder.name, "--judge_check=0"
        )
        assert result.returncode == 1 and words in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert not list(tmp_path.glob("run*/config.json"))  # the folder can be used again


def test_full_fine_tunes_resume_to_the_same_bits_and_come_back(tiny_model, tmp_path):
    """Three models, all parameters trained in bfloat16 compute: what is written is a pool for another run."""
    from stackalign.lm import tokenizer, weights

    for number in range(3):
        shutil.copytree(tiny_model, tmp_path / f"m{number}")
        file = tmp_path / f"m{number}" / "model.safetensors"
        save_file({name: value * (1 + 0.1 * number) for name, value in load_file(file).items()}, file)
    flags = [
        "--train=full", "--dtype=bfloat16", "--norestart_optimizer", "--iterations=2", "--duels=6", "--batch_size=4",
        "--num_instructions=4", "--max_new_tokens=4", "--judge_check=0", "--learning_rate=1e-4",
    ]  # fmt: skip
    run = tmp_path / "run"
    first = cli(f"--pool={','.join(str(tmp_path / f'm{n}') for n in range(3))}", f"--run_dir={run}", *flags)
    assert first.returncode == 0, first.stderr

    def found():
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        models = {n: (run / "agents" / "final" / f"m{n}" / "model.safetensors").read_bytes() for n in range(3)}
        return [{k: v for k, v in row.items() if k != "seconds"} for row in metrics], models

    whole = found()
    for row in whole[0][1:]:
        # The reference is each model as it stood at the iteration's start, so the first step's loss is ln 2.
        assert row["loss"]["first"] == pytest.approx(np.log(2), abs=1e-2) and row["pairs"] > 0
    for number in range(3):
        _, before = weights.load(tmp_path / f"m{number}")
        _, after = weights.load(run / "agents" / "final" / f"m{number}")
        assert np.abs(after["layers"][1]["down"] - before["layers"][1]["down"]).max() > 1e-5
        assert tokenizer.load(run / "agents" / "final" / f"m{number}").eos_ids == (1,)
    shutil.rmtree(run / "checkpoints" / "00000002")
    shutil.rmtree(run / "agents")
    again = cli("--resume", f"--run_dir={run}")
    assert again.returncode == 0, again.stderr
    assert found() == whole

    pool = ",".join(str(run / "agents" / "best" / f"m{n}") for n in range(3))
    plan = cli(f"--pool={pool}", "--train=full", "--dtype=bfloat16", "--dry_run")
    assert plan.returncode == 0, plan.stderr
    assert "parameters now, before the iteration and at the start, float32" in plan.stdout
    meshed = cli(f"--pool={pool}", "--train=full", "--mesh=data=1", f"--run_dir={tmp_path / 'meshed'}")
    assert meshed.returncode == 1 and "--mesh" in meshed.stderr and "Traceback" not in meshed.stderr


@pytest.mark.parametrize("restart", [False, True])
def test_memory_of_full_fine_tunes_by_formula(restart):
    from experiments import plan, prepare
    from stackalign.lm.char_tokenizer import tiny_config

    chosen = settings.resolve(
        "smollm2", {"train": "full", "pool": "a/x,b/y,c/z", "dtype": "bfloat16", "restart_optimizer": restart}
    )
    configs = {"a/x": tiny_config(20), "b/y": tiny_config(30), "c/z": tiny_config(40)}
    sizes = [prepare.num_parameters(config) for config in configs.values()]
    found = plan._trained_bytes(chosen, configs, dict.fromkeys(configs, 1), np.dtype("bfloat16"))
    moments = 8 * sizes[2] + (0 if restart else 16 * sum(sizes))
    assert list(found.values()) == [12 * sum(sizes), moments + 8 * sizes[2], 2 * sizes[2]]


def test_dry_run_prints_the_plan(tiny_model):
    result = cli("--preset=paper_dpo", f"--pool={tiny_model},{tiny_model},{tiny_model}", "--dry_run", "--dtype=float32")
    assert result.returncode == 0, result.stderr
    for words in ("Models", "3 agent(s)", "Memory", "128 generations", "128 judgements", "Hours", "in all"):
        assert words in result.stdout, result.stdout
