"""Chat models behind an OpenAI-compatible endpoint, judges above all, with a cache on disk."""

import concurrent.futures
import dataclasses
import email.utils
import hashlib
import json
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

try:
    import httpx2 as httpx  # the maintained continuation of httpx, which newer huggingface_hub versions bring
except ImportError:
    import httpx

from stackalign.judges.parsing import parse_score
from stackalign.judges.prompts import judge_prompt

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT = 300.0
_BUDGET_GROWTH = 8


class EndpointError(RuntimeError):
    """The endpoint cannot be used as configured; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """Where and how to ask.

    Attributes:
      base_url: up to and including the version, such as `https://host/v1`; `/chat/completions` is appended.
      model: the model's name at the endpoint.
      api_key_env: environment variable with the key; unset means that no key is sent.
      temperature: 0 = greedy (the paper's judges are greedy).
      max_tokens: budget of new tokens of the first try (the paper's 64).
      max_tokens_limit: up to which the budget is raised, eightfold each time, when a reply came out empty or cut
        because it ran out of tokens (models that reason before they answer).
      timeout: seconds for one request.
      max_retries: further tries after 429, 5xx, time-outs, broken connections and broken replies.
      backoff: seconds before the first of those tries, doubled each time, unless the server says Retry-After.
      concurrency: requests in flight at once.
      flag: what messages call the address.
    """

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = 0.0
    max_tokens: int = 64
    max_tokens_limit: int = 4096
    timeout: float = 60.0
    max_retries: int = 5
    backoff: float = 1.0
    concurrency: int = 8
    flag: str = "--judge_endpoint"

    @property
    def url(self) -> str:
        """The address that requests go to."""
        return self.base_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


class Reply(NamedTuple):
    """A reply's text, and why it ended: "stop", "length" or whatever else the server says."""

    content: str
    finish_reason: str | None


def score(
    config: EndpointConfig,
    cache_dir: str | os.PathLike,
    items: Sequence[tuple[str, str]],
    *,
    client: httpx.Client | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> np.ndarray:
    """Scores every `(instruction, response)`, asked with the paper's prompt; see `complete`.

    Args:
      items: `[N]` pairs of instruction text and response text.

    Returns:
      `[N]` float64 scores in [1, 10] in the order of `items`, NaN for failures: no reply, or no score in it.
    """
    chats = [({"role": "user", "content": judge_prompt(*item)},) for item in items]
    replies = complete(config, cache_dir, chats, enough=_has_score, client=client, progress=progress)
    scores = [None if reply is None else parse_score(reply.content).score for reply in replies]
    return np.array([np.nan if value is None else value for value in scores], np.float64)


def _has_score(content: str) -> bool:
    return parse_score(content).score is not None


def complete(
    config: EndpointConfig,
    cache_dir: str | os.PathLike,
    chats: Sequence[Sequence[Mapping[str, str]]],
    *,
    enough: Callable[[str], bool] = bool,
    client: httpx.Client | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Reply | None]:
    """Replies to chats; equal chats are asked once, now and in later calls.

    A reply is kept in `cache_dir` as one file named by the SHA-256 of its request, so that a stopped run goes on where
    it was. There is no reply (None) when the server refuses this one request (400, 413, 422) or when it still gave none
    after all retries. A reasoning field is never read.

    Args:
      config: the endpoint.
      cache_dir: folder of the cache; made if missing.
      chats: `[N]` lists of messages, `{"role", "content"}` each.
      enough: whether a reply that was cut by its budget of tokens will do; else it is asked again with a larger one.
      client: an httpx client to use (and leave open); by default one is made and closed.
      progress: called from this thread with (requests done, requests in all) as replies come in.

    Raises:
      EndpointError: the address cannot be reached, the key (401, 403) or the address or model (404) is wrong, or not a
        single request got a reply.
    """
    cache = pathlib.Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    requests = [_request(config, chat) for chat in chats]
    paths = [_cache_path(cache, config, request) for request in requests]
    pending = dict(zip(paths, requests, strict=True))
    own_client = client is None
    client = client if client is not None else httpx.Client(timeout=config.timeout)
    replies: dict[pathlib.Path, Reply | None] = {}
    errors: list[str] = []
    executor = concurrent.futures.ThreadPoolExecutor(max(1, config.concurrency))
    try:
        futures = {
            executor.submit(_reply, config, client, path, request, enough): path for path, request in pending.items()
        }
        for future in concurrent.futures.as_completed(futures):
            replies[futures[future]], error = future.result()
            if error is not None:
                errors.append(error)
                _LOG.warning("endpoint: %s", error)
            if progress is not None:
                progress(len(replies), len(pending))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        if own_client:
            client.close()
    if errors and len(errors) == len(pending):
        raise EndpointError(f"none of {len(pending)} requests to {config.url} got a reply; the last: {errors[-1]}")
    return [replies[path] for path in paths]


class _RequestFailed(Exception):
    """This one request got no reply."""


def _request(config: EndpointConfig, chat: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {
        "model": config.model,
        # No lone surrogates.
        "messages": [{**one, "content": one["content"].encode("utf-8", "replace").decode("utf-8")} for one in chat],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }


def _cache_path(cache: pathlib.Path, config: EndpointConfig, request: dict[str, Any]) -> pathlib.Path:
    canonical = json.dumps([config.url, request], sort_keys=True, separators=(",", ":"))
    return cache / f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"


def _reply(
    config: EndpointConfig,
    client: httpx.Client,
    path: pathlib.Path,
    request: dict[str, Any],
    enough: Callable[[str], bool],
) -> tuple[Reply | None, str | None]:
    """`(reply, None)` from the cache or the endpoint, or `(None, error)`."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept["content"], str):
            return Reply(kept["content"], kept.get("finish_reason")), None
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        _LOG.warning("endpoint: asking again, as the cache file %s is broken", path)
    try:
        while True:
            reply = _ask(config, client, request)
            if reply.finish_reason != "length" or enough(reply.content):
                break
            if request["max_tokens"] >= config.max_tokens_limit:
                break
            budget = min(request["max_tokens"] * _BUDGET_GROWTH, config.max_tokens_limit)
            request = {**request, "max_tokens": budget}
    except _RequestFailed as error:
        return None, str(error)
    if reply.content.strip():  # an empty reply may be a passing fault: ask again in the next call
        _write(path, {**reply._asdict(), "request": request})
    return reply, None


def _ask(config: EndpointConfig, client: httpx.Client, request: dict[str, Any]) -> Reply:
    """One completion, with retries."""
    key = os.environ.get(config.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    tries = 0
    while True:
        wait = None
        try:
            response = client.post(config.url, json=request, headers=headers, timeout=config.timeout)
            if response.status_code == 200:
                return _content(response)
            _raise_if_final(config, response)
            problem = f"status {response.status_code}: {response.text[:300]}"
            wait = _retry_after(response)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EndpointError(
                f"{config.flag}={config.base_url} is not a usable http(s) address: {error}"
            ) from error
        except httpx.ConnectError as error:
            if tries >= min(2, config.max_retries):
                raise EndpointError(
                    f"cannot reach {config.url} ({error}); check {config.flag} and that the server runs"
                ) from error
            problem = f"cannot connect: {error}"
        except (httpx.TransportError, ValueError, LookupError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if tries >= config.max_retries:
            raise _RequestFailed(f"no reply after {tries + 1} tries; {problem}")
        time.sleep(min(config.backoff * 2**tries, _LONGEST_WAIT) if wait is None else wait)
        tries += 1


def _content(response: httpx.Response) -> Reply:
    choice = response.json()["choices"][0]
    content = choice["message"].get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"message content is {type(content).__name__}, not text")
    return Reply(content, choice.get("finish_reason"))


def _raise_if_final(config: EndpointConfig, response: httpx.Response) -> None:
    status, body = response.status_code, response.text[:300]
    if status in (401, 403):
        raise EndpointError(
            f"{config.url} refused the key (status {status}); set the environment variable {config.api_key_env} to a "
            f"valid key for {config.flag}: {body}"
        )
    if status == 404:
        raise EndpointError(
            f"{config.url} has no chat completions or no model {config.model!r} (status 404); check that "
            f"{config.flag} ends in the API version, such as /v1, and the model's name: {body}"
        )
    if 300 <= status < 500 and status not in (408, 409, 425, 429):
        raise _RequestFailed(f"status {status}: {body}")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait for, at most five minutes; None if it does not say."""
    value = response.headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), _LONGEST_WAIT) if np.isfinite(seconds) else None


def _write(path: pathlib.Path, record: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
