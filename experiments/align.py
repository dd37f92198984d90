"""Stackelberg Alignment: a pool of language models duels, judges itself and learns from its own preferences.

    python -m experiments.align                      # four agents on SmolLM2-135M, about 5 minutes on two CPU cores
    python -m experiments.align --preset=toy         # six tiny decoders made in the run, 2 to 4 minutes
    python -m experiments.align --preset=paper_dpo --pool=/models/a,/models/b,/models/c --dry_run

Every run is a folder: config.json, instructions.jsonl, duels.jsonl (one line a duel), metrics.jsonl (one line an
iteration), checkpoints/, agents/ (the trained adapters in PEFT's format; with --train=full whole models, which the
--pool of another run takes) and report/ (report.md, summary.json, figures). A run that was stopped, by Ctrl-C or
otherwise, goes on to the same bits with

    python -m experiments.align --resume --run_dir=FOLDER

Your own pool: --pool=folder_a,org/name,smollm2 or a JSON list of {"name", "base", "adapter", "system_prompt"}.
Your own instructions: --instructions=FILE.jsonl with "id" and "prompt" on each line, and "answer" or "verifier" where
an answer can be checked. Your own judge: --judge_endpoint=URL --judge_model=NAME (OpenAI-compatible).
Settings come from --preset; flags that are given override it.
"""

import json
import os
import pathlib
import resource
import sys
import threading
import time
import warnings
from typing import Any

from absl import app, flags, logging

from experiments import compilation, plan, prepare, settings

FLAGS = flags.FLAGS

flags.DEFINE_enum("preset", "smollm2", list(settings.PRESETS), "Where settings come from that no flag gives.")
flags.DEFINE_string("run_dir", None, "Folder of the run; by default outputs/PRESET-DATE-TIME.")
flags.DEFINE_bool("resume", False, "Go on with the run in --run_dir where its last checkpoint stands.")
flags.DEFINE_bool("dry_run", False, "Print the plan (models, memory, calls, estimated hours) and stop.")
flags.DEFINE_integer("seed", None, "Seed of everything random.")

flags.DEFINE_string("pool", None, "The agents: names or folders separated by commas, or a JSON file (see above).")
flags.DEFINE_string("instructions", None, "JSONL file of instructions; by default verifiable ones are generated.")
flags.DEFINE_string("test_instructions", None, "JSONL file of test instructions, used once at the end.")
flags.DEFINE_integer("num_instructions", None, "K: how many instructions of the pool are in play.")
flags.DEFINE_integer("iterations", None, "T.")
flags.DEFINE_integer("duels", None, "D: duels an iteration.")
flags.DEFINE_integer("duels_per_round", None, "Duels matched with the same reputations: 0 = all, 1 = one by one.")
flags.DEFINE_enum("leader", None, settings.CHOICES["leader"], "Who picks the instructions.")
flags.DEFINE_float("leader_gamma", None, "EXP3's exploration rate.")
flags.DEFINE_float("leader_eta", None, "EXP3's step size; 1 is the paper's printed equation 5.")
flags.DEFINE_bool("fresh_instructions", None, "Draw K new instructions every iteration and restart the leader.")
flags.DEFINE_enum("strategy", None, settings.CHOICES["strategy"], "How opponents are matched.")
flags.DEFINE_enum("schedule", None, settings.CHOICES["schedule"], "How the target gaps move.")
flags.DEFINE_integer("num_opponents", None, "n_opp: candidates by nearest reputation; 0 = the strategy's own default.")
flags.DEFINE_float("random_rate", None, "p_rand: share of duels with a random opponent.")
flags.DEFINE_enum("reputation", None, settings.CHOICES["reputation"], "Constants and conventions of the ratings.")
flags.DEFINE_enum("weighting", None, settings.CHOICES["weighting"], "Judges' weights in the mean score.")
flags.DEFINE_enum("judge", None, settings.JUDGES, "Peers: the first four. External: verifier, random (a control).")
flags.DEFINE_string("judge_endpoint", None, "Base URL of an OpenAI-compatible judge that replaces the peers.")
flags.DEFINE_string("judge_model", None, "The judge's model name at the endpoint.")
flags.DEFINE_string("judge_api_key_env", None, "Environment variable that holds the endpoint's key.")
flags.DEFINE_enum("on_parse_failure", None, settings.CHOICES["on_parse_failure"], "Leave the judge out, or score 5.")
flags.DEFINE_integer(
    "judge_check", None, "Right/wrong pairs that measure every judge first; 0 = none."
)
flags.DEFINE_float("temperature", None, "Of the duels' answers.")
flags.DEFINE_float("top_p", None, "Of the duels' answers.")
flags.DEFINE_integer("top_k", None, "Of the duels' answers; 0 is no cut.")
flags.DEFINE_integer("max_new_tokens", None, "Longest answer.")
flags.DEFINE_float("learning_rate", None, "AdamW's peak rate; cosine to 0 in every iteration.")
flags.DEFINE_float("beta", None, "DPO's inverse temperature.")
flags.DEFINE_float("nll_weight", None, "Weight of the chosen answer's mean negative log-likelihood in the loss.")
flags.DEFINE_float("label_smoothing", None, "Share of wrong preferences that the loss assumes.")
flags.DEFINE_float("min_chosen_score", None, "Train only on pairs whose better answer scored at least this.")
flags.DEFINE_integer("batch_size", None, "Pairs of one optimizer step.")
flags.DEFINE_integer("epochs", None, "Passes over an iteration's pairs.")
flags.DEFINE_float("weight_decay", None, "AdamW's weight decay.")
flags.DEFINE_float("max_grad_norm", None, "Gradient norm at which each agent's gradient is clipped.")
flags.DEFINE_bool("restart_optimizer", None, "Fresh AdamW moments every iteration.")
flags.DEFINE_integer("micro_tokens", None, "Padded tokens of one forward and backward pass; lower it to save memory.")
flags.DEFINE_integer("batch_tokens", None, "Padded tokens of one generation batch; lower it to save memory.")
flags.DEFINE_bool("remat", None, "Recompute activations in the backward pass to save memory.")
flags.DEFINE_enum("train", None, settings.CHOICES["train"], "Adapters on frozen bases, or all parameters of each base.")
flags.DEFINE_integer("lora_rank", None, "Rank of the adapters.")
flags.DEFINE_float("lora_alpha", None, "Adapters are scaled by alpha / rank.")
flags.DEFINE_float("lora_dropout", None, "Dropout on the adapters' inputs.")
flags.DEFINE_string("lora_targets", None, "Projections with an adapter, of q,k,v,o,gate,up,down.")
flags.DEFINE_enum("dtype", None, settings.CHOICES["dtype"], "Of what computes; what is trained is float32.")
flags.DEFINE_string(
    "mesh", "", "Devices to use, such as fsdp=8 or data=2,fsdp=2,tensor=2; by default one. Another may resume a run."
)
flags.DEFINE_integer("pretrain_steps", None, "Toy: steps of the shared base.")
flags.DEFINE_integer("specialise_steps", None, "Toy: steps of each agent's specialisation.")

for _name in settings.PAPER:
    FLAGS[_name].help += settings.defaults(_name)


def read_settings() -> dict[str, Any]:
    """Settings of this run; with --resume those of the folder, which given flags may not contradict."""
    given = {name: FLAGS[name].value for name in settings.PAPER if FLAGS[name].present}
    if not FLAGS.resume:
        return settings.resolve(FLAGS.preset, given)
    if not FLAGS.run_dir:
        raise ValueError("--resume needs --run_dir=FOLDER, the folder of the run to go on with")
    file = pathlib.Path(FLAGS.run_dir) / "config.json"
    if not file.exists():
        raise ValueError(
            f"--resume: {FLAGS.run_dir} holds no run (no config.json); to start one leave out --resume"
        )
    saved = json.loads(file.read_text(encoding="utf-8"))
    preset = FLAGS.preset if FLAGS["preset"].present else saved["preset"]
    kept = {name: saved[name] for name in settings.PAPER if name in saved}
    return settings.resolve(preset, {**{k: v for k, v in kept.items() if v != settings.PRESETS[preset][k]}, **given})


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags start with --")
    logging.set_verbosity(logging.WARNING)
    try:
        chosen = read_settings()
        if FLAGS.dry_run:
            print(plan.describe(chosen))
            return 0
        return run(chosen)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("STACKALIGN_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(chosen: dict[str, Any]) -> int:
    """One run from settings to report."""
    import jax

    from stackalign import runs
    from stackalign.algorithms import align

    compilation.use_cache()
    programs = compilation.count_programs()
    began = time.monotonic()
    folder = FLAGS.run_dir or f"outputs/{chosen['preset']}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = " ".join(
        ["python", "-m", "experiments.align", *(a for a in sys.argv[1:] if not a.startswith("--resume"))]
    )
    config = {**chosen, "command": command}
    prepare.check_instruction_files(chosen)
    run_folder = runs.open_(folder, config) if FLAGS.resume else runs.create(folder, config)
    print(f"run folder: {folder}", file=sys.stderr)
    with run_folder, runs.Bars() as progress:
        try:
            try:
                ready = prepare.ready(chosen, run_folder, progress, FLAGS.mesh)
            except Exception:
                if not FLAGS.resume:  # nothing was computed: the folder can be used again with other settings
                    run_folder.config.unlink(missing_ok=True)
                raise
            prepare.check_judges(chosen, run_folder, ready, progress)
            state = align.init(
                jax.random.key(chosen["seed"]),
                ready.config,
                ready.pool,
                ready.task,
                chosen["num_instructions"],
                ready.stacks,
            )
            restored = runs.resume(run_folder, state)
            if restored is None:
                record = align.baseline(ready.config, ready.pool, ready.task, state, progress)
                prepare.write_instructions(run_folder, ready.task, state)
                runs.commit(run_folder, 0, state, record.duels, record.metrics, best=True)
            else:
                state = restored.state
            best = prepare.best_validation(run_folder)
            progress("iteration", state.iteration, ready.config.iterations, "it")
            for after, record in align.align(ready.config, ready.pool, ready.task, state, progress):
                value = record.metrics["validation_mean"]
                improved = value is None or value > best
                best = value if improved and value is not None else best
                state = after
                runs.commit(run_folder, state.iteration, state, record.duels, record.metrics, best=improved)
                progress("iteration", state.iteration, ready.config.iterations, "it")
                progress.write(prepare.one_line(record))
            prepare.finish(chosen, run_folder, ready, state, progress)
        except KeyboardInterrupt:
            # What was cut off in the middle of a checkpoint says so when it is freed: noise beside the message below.
            sys.unraisablehook = lambda _: None
            warnings.simplefilter("ignore")
            progress.close()
            # Threads that write a checkpoint would fail aloud if the interpreter shut down under them.
            for thread in threading.enumerate():
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join(timeout=60)
            print(
                f"\nstopped; every finished iteration is saved. Go on with\n  python -m experiments.align --resume "
                f"--run_dir={folder}",
                file=sys.stderr,
            )
            return 130
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    of_models = ("generate", "completion_log_probs", "_next_log_probs", "gradient", "apply")
    counted = {name: programs[name] for name in of_models if name in programs} | {"all": sum(programs.values())}
    found = {"peak_memory_bytes": peak, "wall_seconds": time.monotonic() - began, "programs": counted}
    prepare.note(run_folder, found)
    summary = runs.build(run_folder.path)
    print(summary["verdict"])
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    print(f"report: {run_folder.report / 'report.md'}")
    return 0


if __name__ == "__main__":
    app.run(main)
