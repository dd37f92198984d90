"""The notebooks: what they show is saved in them, and they run top to bottom on CPU in a fresh kernel.

Running one takes 20 to 60 seconds on two cores.
"""

import base64
import io
import os
import pathlib
import re
import sys
import time

import jax
import matplotlib.image
import nbclient
import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("ensemble_variance", "leader_and_reputations", "stackelberg_game")
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
LIMIT = 240  # seconds from start to end, compilation included: twice what is promised, other tests run beside it
ABSOLUTE_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.+-]+){2,}|\b[A-Z]:\\")


class _ThisInterpreter(KernelSpecManager):
    """Whatever kernels are installed on the machine: the kernel is the interpreter that runs the tests."""

    def get_kernel_spec(self, kernel_name):
        command = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python", display_name=kernel_name)


class _KernelManager(AsyncKernelManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, kernel_spec_manager=_ThisInterpreter(), **kwargs)


def _read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _outputs(notebook):
    return [output for cell in _code(notebook) for output in cell.outputs]


def _images(notebook):
    found = [output.data.get("image/png") for output in _outputs(notebook) if "data" in output]
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(png))) for png in found if png]


def _is_blank(image):
    """Fewer than 1 % of the pixels differ from the most frequent colour."""
    pixels = np.round(255 * image[..., :3]).astype(int).reshape(-1, 3) @ (1, 256, 65536)
    return np.unique(pixels, return_counts=True)[1].max() > 0.99 * pixels.size


def test_all_are_there_and_start_alike():
    assert [path.stem for path in NOTEBOOKS] == list(NAMES)
    assert len({_read(path).cells[0].source for path in NOTEBOOKS}) == 1


def test_a_blank_image_is_blank():
    image = np.ones((100, 100, 4))
    assert _is_blank(image)
    image[:20, :20, 0] = 0.0
    assert not _is_blank(image)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs(path):
    notebook = _read(path)
    cells = _code(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "save it after a run from the top"
    for cell in cells:
        assert "execution" not in cell.metadata, "times of execution change with every run"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.get("text")
            text = output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
            assert not ABSOLUTE_PATH.search(text), text
    images = _images(notebook)
    assert len(images) >= 3
    assert not any(map(_is_blank, images))
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    notebook = _read(path)
    expected = len(_images(notebook))
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None
    environment = os.environ | {
        "IPYTHONDIR": str(tmp_path),  # nobody's start-up files
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(jax.config.jax_persistent_cache_min_compile_time_secs),
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT,  # of each cell
        kernel_manager_class=_KernelManager,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    client.execute(env=environment)
    assert time.perf_counter() - start < LIMIT
    images = _images(notebook)
    assert len(images) >= expected
    assert not any(map(_is_blank, images))
