"""What a model needs on every device of a mesh, before anything is loaded: compiled ahead of time, nothing is computed.

    python -m experiments.plan_memory --model=qwen2.5-7b --mesh=fsdp=8          # about a minute on two CPU cores
    python -m experiments.plan_memory --model=FOLDER --mesh=data=2,fsdp=4 --agents=4 --rows=64

The programs of a run (answering, scoring as a judge, a DPO step) are compiled for simulated devices of the mesh.
Prints, per device: parameters, adapters with their moments, inputs and outputs, temporaries of each program, and what
the devices exchange; then whether the largest program fits into --device_gb, and what would if it does not. The exit
status is 1 if it does not fit.

Parameters and adapters are exact. Temporaries are those of XLA's CPU compiler, which holds bfloat16 matmuls in float32
and fuses less than its GPU compiler, so that they are an upper estimate for a GPU; GPUs also need room for the runtime
(about 1 GB). --model takes what --pool of experiments.align takes, or the name of a shape: qwen2.5-1.5b, qwen2.5-7b,
llama-3.1-8b, aya-expanse-8b.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from experiments.shapes import SHAPES

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "qwen2.5-1.5b", "A model or the name of a shape (see above).")
flags.DEFINE_string("mesh", "fsdp=8", "The devices, as --mesh of experiments.align.")
flags.DEFINE_float("device_gb", 80.0, "Memory of one device, in GB.", lower_bound=0.1)
flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the base.")
flags.DEFINE_integer("agents", 4, "Agents on the base.", lower_bound=1)
flags.DEFINE_integer("lora_rank", 64, "Rank of their adapters.", lower_bound=1)
flags.DEFINE_string("lora_targets", "q,k,v,o", "Projections with an adapter.")
flags.DEFINE_integer("rows", 32, "Rows of a batch that answers or judges, all devices together.", lower_bound=1)
flags.DEFINE_integer("train_rows", 8, "Pairs of a training batch, all devices together.", lower_bound=1)
flags.DEFINE_integer("prompt", 512, "Tokens of a prompt.", lower_bound=1)
flags.DEFINE_integer("new", 512, "Tokens of an answer.", lower_bound=1)
flags.DEFINE_bool("remat", True, "Recompute activations in the training step.")

# The scheduler of XLA's GPU compiler minds memory; the CPU compiler's usual one gathers all layers' weights at once.
MEMORY_FIRST = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}


def exchanged(text: str) -> dict[str, tuple[int, float]]:
    """Collectives of a compiled program by kind: how many stand in it, and the bytes of their results on a device.

    What stands in a loop counts once.
    """
    found: dict[str, tuple[int, float]] = {}
    for shapes, kind in _COLLECTIVE.findall(text):
        size = 0.0
        for dtype, dimensions in _ARRAY.findall(shapes):
            count = 1
            for dimension in filter(None, dimensions.split(",")):
                count *= int(dimension)
            size += count * _BITS.get(dtype, int(re.sub(r"\D", "", dtype) or 8)) / 8
        number, total = found.get(kind, (0, 0.0))
        found[kind] = number + 1, total + size
    return found


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    try:
        return plan()
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def plan() -> int:
    """Compiles the programs and prints the table; 0 if all fit."""
    import jax

    from stackalign.lm import sharding

    sizes = sharding.parse_sizes(FLAGS.mesh)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(math.prod(sizes.values()), 1))

    from experiments import plan as plan_lib
    from stackalign.lm import LoraConfig, weights
    from stackalign.lm.weights import hf_config

    shape = SHAPES.get(FLAGS.model)
    config = hf_config.from_hf(shape) if shape else plan_lib.read_config(FLAGS.model)
    lora_config = LoraConfig(rank=FLAGS.lora_rank, targets=tuple(FLAGS.lora_targets.split(",")))
    mesh = sharding.make_mesh(**sizes)
    held, programs = lower(config, lora_config, mesh)

    total = weights.num_parameters(config) / 1e9
    print(f"{FLAGS.model}: {total:.2f}B parameters in {FLAGS.dtype} on {FLAGS.mesh}; {FLAGS.agents} agents")
    for name, size in held.items():
        print(f"  {name:<28}{size / 1e9:9.2f} GB a device")
    for_rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for flag, number in (("rows", FLAGS.rows), ("train_rows", FLAGS.train_rows)):
        if number % for_rows:
            print(f"warning: --{flag}={number} is no multiple of data x fsdp = {for_rows}: devices compute it all")
    always, largest, worst = sum(held.values()), 0.0, ""
    for name, program in programs.items():
        print(f"compiling: {name}", file=sys.stderr, flush=True)
        compiled = program().compile(MEMORY_FIRST)
        memory = compiled.memory_analysis()
        need = always + memory.temp_size_in_bytes + memory.output_size_in_bytes
        kinds = sorted(exchanged(compiled.as_text()).items())
        moved = ", ".join(f"{count} {kind} ({size / 1e9:.2f} GB)" for kind, (count, size) in kinds)
        print(f"  {name:<28}{need / 1e9:9.2f} GB a device, of it temporaries {memory.temp_size_in_bytes / 1e9:.2f}")
        print(f"    exchanged in one pass: {moved or 'nothing'}")
        if need > largest:
            largest, worst = need, name
    room = FLAGS.device_gb * 1e9
    if largest <= room:
        print(f"fits: at most {largest / 1e9:.1f} of {FLAGS.device_gb:g} GB ({worst})")
        return 0
    if always > room:
        hint = f"parameters, adapters and moments alone take {always / 1e9:.1f} GB: more devices along fsdp or tensor"
    else:
        rows = FLAGS.train_rows if worst.startswith("train") else FLAGS.rows
        hint = f"about {max(int(rows * (room - always) / (largest - always)), 1)} rows would fit"
    print(f"does not fit: {worst} needs {largest / 1e9:.1f} of {FLAGS.device_gb:g} GB; {hint}")
    return 1


def lower(config, lora_config, mesh) -> tuple[dict[str, int], dict[str, Callable[[], Any]]]:
    """What lies on a device all the time, and the programs by name, each a call that lowers it for the mesh.

    Nothing is allocated: arrays are shapes with shardings.

    Returns:
      Bytes a device by kind, and the programs.
    """
    import jax
    import jax.numpy as jnp

    from stackalign.lm import decoder, generate, lora, score, sharding, training

    key, vocab = jax.random.key(0), config.vocab_size
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def stand(leaf, where=whole):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    def rows_of(shape, dtype, axis=0):
        spec = jax.sharding.PartitionSpec(*[None] * axis, ("data", "fsdp"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.fit(spec, shape, mesh))

    def per_device(tree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)

    params = jax.eval_shape(lambda: decoder.init(key, config, jnp.dtype(FLAGS.dtype)))
    params = jax.tree.map(stand, params, sharding.shardings(params, mesh))
    stack = jax.tree.map(stand, jax.eval_shape(lambda: lora.init(key, config, lora_config, FLAGS.agents)))
    moments = jax.tree.map(stand, jax.eval_shape(lambda: training.init(training.adamw(), stack)))
    held = {"parameters": per_device(params), "adapters": per_device(stack), "moments": per_device(moments)}

    rows, prompt, new = FLAGS.rows, FLAGS.prompt, FLAGS.new
    mixed = lora.rows(lora_config, FLAGS.agents, jnp.zeros(rows, jnp.int32))
    ids, mask = rows_of((rows, prompt), jnp.int32), rows_of((rows, prompt), bool)
    answers, answer_mask = rows_of((rows, new), jnp.int32), rows_of((rows, new), bool)
    each = max(FLAGS.train_rows // FLAGS.agents, 1)
    batch = training.Batch(
        *(rows_of((FLAGS.agents, each, prompt), dtype, 1) for dtype in (jnp.int32, bool)),
        *(rows_of((FLAGS.agents, each, 2, new), dtype, 1) for dtype in (jnp.int32, bool)),
    )
    log_probs = jax.jit(score.completion_log_probs, static_argnames=("config", "vocab_size", "mesh"))
    return held, {
        f"answer {rows} prompts": lambda: generate.generate.lower(
            params, stack, config, rows_of((rows,), key.dtype), ids, mask, mixed, max_new_tokens=new, top_p=0.9,
            eos_ids=(0,), vocab_size=vocab, mesh=mesh,
        ),
        f"judge {rows} answers": lambda: log_probs.lower(
            params, stack, config, ids, mask, answers, answer_mask, mixed, vocab_size=vocab, mesh=mesh
        ),
        f"train on {each * FLAGS.agents} pairs": lambda: training.gradient.lower(
            params, stack, jax.ShapeDtypeStruct((), key.dtype), batch, config=config, lora_config=lora_config,
            loss=_loss, vocab_size=vocab, remat=FLAGS.remat, mesh=mesh,
        ),
    }  # fmt: skip


def _loss(log_probs, batch):
    return log_probs.sum(), ()


if __name__ == "__main__":
    app.run(main)
