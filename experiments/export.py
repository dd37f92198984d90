"""An agent as a Hugging Face folder: its base with its adapter merged in, or a base alone in that format.

    python -m experiments.export --adapter=outputs/run/agents/best/solver --out_dir=solver
    python -m experiments.export --base=model.gguf --out_dir=model --dtype=float32

Writes config.json, safetensors (in shards of 5 GB) and the base's tokenizer files, which transformers and other servers
load. An agent's system prompt is not part of its weights: give it with your messages. Host memory holds the base in
float32 and one shard; a base of 135M parameters takes seconds.
"""

import pathlib
import sys

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("adapter", None, "A PEFT folder: an agent of a run (agents/best/NAME) or any plain LoRA.")
flags.DEFINE_string("base", None, "The base; by default the one that the adapter names.")
flags.DEFINE_string("out_dir", None, "The folder to write; new or empty.", required=True)
flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16", "float16"], "Of the parameters that are written.")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    if not FLAGS.adapter and not FLAGS.base:
        raise app.UsageError("give --adapter, --base, or both")
    folder = pathlib.Path(FLAGS.out_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise app.UsageError(f"--out_dir={folder} is not an empty folder")

    import numpy as np

    from stackalign.lm import tokenizer, weights
    from stackalign.lm.config import UnsupportedModelError
    from stackalign.lm.weights import export, fetch, peft

    try:
        shape, named = peft.read_shape(FLAGS.adapter) if FLAGS.adapter else (None, None)
        path = fetch.resolve(FLAGS.base or named)
        config, params = weights.load(path, dtype=np.float32)
        adapter = peft.load(FLAGS.adapter, config, shape) if FLAGS.adapter else None
        scale = shape.scale if shape else 1.0
        token_ids = export.read_token_ids(path)
        export.save(folder, config, params, adapter, scale=scale, dtype=FLAGS.dtype, token_ids=token_ids)
    except (weights.CheckpointError, UnsupportedModelError, fetch.FetchError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        tokenizer.save(path, folder)
    except tokenizer.TokenizerError as error:
        print(f"warning: no tokenizer was written: {error}", file=sys.stderr)
    what = f"{FLAGS.base or named}" + (f" with {FLAGS.adapter} merged in" if FLAGS.adapter else "")
    print(f"{folder}: {what}, {weights.num_parameters(config) / 1e6:.0f}M parameters in {FLAGS.dtype}")
    return 0


if __name__ == "__main__":
    app.run(main)
