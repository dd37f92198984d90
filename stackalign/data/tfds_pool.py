"""Instruction pools as data sets of TensorFlow Datasets, whose files are read at random without loading them whole."""

import json
import os
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from stackalign.data.instructions import Instruction

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def prepare(instructions: Sequence[Instruction], data_dir: str | os.PathLike, name: str) -> pathlib.Path:
    """Writes a pool as the data set `name`, version 1.0.0, with one split, in the order given.

    Texts are stored as such, absent ones empty, a verifier as its JSON; TensorFlow itself is not needed.

    Args:
      instructions: at least one.
      data_dir: folder of data sets, made if missing.
      name: lower-case letters, digits and underscores.

    Returns:
      The data set's folder, which `instructions.read` and `tfds.builder_from_directory` take.

    Raises:
      FileExistsError: there is one by that name.
      ImportError: tensorflow-datasets is not installed.
      ValueError: no instructions, or a name of another form.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError("writing data sets needs tensorflow-datasets: pip install 'stackalign[evals]'") from error
    if not instructions:
        raise ValueError("a pool needs at least one instruction")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: use lower-case letters, digits and underscores, a letter first")
    if (pathlib.Path(data_dir) / name / "1.0.0").exists():
        raise FileExistsError(f"{data_dir} has a data set {name!r}; remove it or give another name")

    class InstructionPool(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            texts = {field: tfds.features.Text() for field in ("id", "prompt", "answer", "verifier", "topic")}
            features = tfds.features.FeaturesDict({**texts, "difficulty": tfds.features.Scalar(np.int64)})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number, row in enumerate(instructions):
                verifier = "" if row.verifier is None else json.dumps(row.verifier, ensure_ascii=False, default=dict)
                texts = {"id": row.id, "prompt": row.prompt, "answer": row.answer or "", "topic": row.topic}
                yield number, {**texts, "verifier": verifier, "difficulty": row.difficulty}

    InstructionPool.name = name
    builder = InstructionPool(data_dir=os.fspath(data_dir), file_format="array_record")
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)
