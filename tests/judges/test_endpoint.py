import collections
import email.utils
import http.server
import json
import socket
import threading
import time

import numpy as np
import pytest

from stackalign.judges import EndpointConfig, EndpointError, endpoint, judge_prompt


class Server:
    """A local endpoint: `answer(request, number of times this prompt was asked) -> (status, body, headers)`."""

    def __init__(self, answer):
        self.requests, self.headers, self.paths = [], [], []
        self.running = self.most_running = 0
        asked, lock, server = collections.Counter(), threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = request["messages"][0]["content"]
                with lock:
                    asked[prompt] += 1
                    times = asked[prompt]
                    server.requests.append(request)
                    server.headers.append(self.headers)
                    server.paths.append(self.path)
                    server.running += 1
                    server.most_running = max(server.most_running, server.running)
                status, body, headers = answer(request, times)
                with lock:
                    server.running -= 1
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def serve(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def reply(content, finish_reason="stop", **message):
    body = {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}]
    }
    return 200, body, {}


def config(url, **fields):
    return EndpointConfig(**{"base_url": url, "model": "judge", "backoff": 0.01, "timeout": 5.0, **fields})


def items(count):
    return [(f"question {i}", f"answer {i}") for i in range(count)]


def number(request):
    return int(request["messages"][0]["content"].split("Question: question ")[1].split("\n")[0])


def test_scores_come_back_in_order_with_bounded_concurrency(serve, tmp_path, monkeypatch):
    def answer(request, times):
        time.sleep(0.02 * (3 - number(request) % 3))
        return reply(json.dumps({"score": number(request) % 10 + 1}))

    server = serve(answer)
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    seen = []
    scores = endpoint.score(
        config(server.url, concurrency=3, api_key_env="JUDGE_KEY"),
        tmp_path,
        items(20),
        progress=lambda done, total: seen.append((done, total)),
    )
    np.testing.assert_array_equal(scores, [i % 10 + 1 for i in range(20)])
    assert 1 < server.most_running <= 3
    assert seen == [(i, 20) for i in range(1, 21)]
    first = next(request for request in server.requests if number(request) == 0)
    assert first == {
        "model": "judge",
        "messages": [{"role": "user", "content": judge_prompt("question 0", "answer 0")}],
        "temperature": 0.0,
        "max_tokens": 64,
    }
    assert set(server.paths) == {"/v1/chat/completions"}
    assert all(headers["authorization"] == "Bearer secret-key" for headers in server.headers)
    assert not any("secret-key" in path.read_text() for path in tmp_path.iterdir())


def test_replies_are_cached_and_asked_once(serve, tmp_path):
    server = serve(lambda request, times: reply("no score at all" if number(request) == 1 else '{"score": 7}'))
    pairs = [*items(3), *items(3)]
    for _ in range(2):
        scores = endpoint.score(config(server.url), tmp_path, pairs)
        np.testing.assert_array_equal(scores, [7, np.nan, 7] * 2)
    assert len(server.requests) == 3
    assert not any(headers["authorization"] for headers in server.headers)
    endpoint.score(config(server.url, model="other"), tmp_path, items(1))
    endpoint.score(config(server.url, temperature=0.5), tmp_path, items(1))
    assert len(server.requests) == 5
    elsewhere = serve(lambda request, times: reply("3"))
    np.testing.assert_array_equal(endpoint.score(config(elsewhere.url), tmp_path, items(1)), [3])
    for path in tmp_path.iterdir():
        path.write_text('{"content": ')
    endpoint.score(config(server.url), tmp_path, items(1))
    assert len(server.requests) == 6


def test_no_items(tmp_path):
    assert endpoint.score(config("http://127.0.0.1:9/v1"), tmp_path, []).shape == (0,)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_faults_are_retried(serve, tmp_path, status):
    server = serve(lambda request, times: (status, {}, {}) if times < 3 else reply("8"))
    np.testing.assert_array_equal(endpoint.score(config(server.url), tmp_path, items(2)), [8, 8])
    assert len(server.requests) == 6


def test_broken_replies_and_time_outs_are_retried(serve, tmp_path):
    def answer(request, times):
        if times == 1:
            return 200, b"<html>", {}
        if times == 2:
            return 200, {"choices": []}, {}
        if times == 3:
            time.sleep(0.6)
        return reply("8")

    server = serve(answer)
    np.testing.assert_array_equal(endpoint.score(config(server.url, timeout=0.3), tmp_path, items(1)), [8])
    assert len(server.requests) == 4


@pytest.mark.parametrize("value", ["0.3", "date"])
def test_retry_after_is_honoured(serve, tmp_path, value):
    stamps = []

    def answer(request, times):
        stamps.append(time.time())
        wait = email.utils.formatdate(time.time() + 2, usegmt=True) if value == "date" else value
        return (429, {}, {"retry-after": wait}) if times == 1 else reply("8")

    server = serve(answer)
    np.testing.assert_array_equal(endpoint.score(config(server.url, backoff=0.0), tmp_path, items(1)), [8])
    assert stamps[1] - stamps[0] >= (0.9 if value == "date" else 0.3)


def test_an_item_that_never_gets_a_reply_fails_alone(serve, tmp_path):
    server = serve(
        lambda request, times: ((500, 400)[number(request) % 2], {}, {}) if number(request) < 2 else reply("8")
    )
    for calls in (1 + 3 + 1, 1 + 3):  # the second call asks only for what failed
        server.requests.clear()
        scores = endpoint.score(config(server.url, max_retries=2), tmp_path, items(3))
        np.testing.assert_array_equal(scores, [np.nan, np.nan, 8])
        assert len(server.requests) == calls


def test_no_reply_at_all_is_an_error(serve, tmp_path):
    server = serve(lambda request, times: (400, {"error": "max_tokens is not supported"}, {}))
    with pytest.raises(EndpointError, match="none of 2 requests.*max_tokens is not supported"):
        endpoint.score(config(server.url), tmp_path, items(2))


@pytest.mark.parametrize("status, words", [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "'judge'")])
def test_wrong_key_and_wrong_address_name_the_flag(serve, tmp_path, status, words):
    server = serve(lambda request, times: (status, {"error": "because"}, {}))
    with pytest.raises(EndpointError, match="--judge_endpoint") as error:
        endpoint.score(config(server.url, concurrency=1), tmp_path, items(50))
    assert words in str(error.value) and "because" in str(error.value)
    assert len(server.requests) < 50


def test_unreachable_hosts_name_the_flag(serve, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/v1", "ftp://127.0.0.1/v1", "127.0.0.1/v1", "http://["):
        with pytest.raises(EndpointError, match="--judge_endpoint"):
            endpoint.score(config(url), tmp_path, items(2))


def test_replies_that_ran_out_of_tokens_are_asked_for_with_a_larger_budget(serve, tmp_path):
    def answer(request, times):
        if request["max_tokens"] < 1000:
            return reply("", "length", reasoning_content='so {"score": 2}')
        return reply('{"score": 8}')

    server = serve(answer)
    for _ in range(2):
        np.testing.assert_array_equal(endpoint.score(config(server.url), tmp_path, items(1)), [8])
    assert [request["max_tokens"] for request in server.requests] == [64, 512, 4096]


@pytest.mark.parametrize("content", ["", None])
def test_reasoning_is_never_parsed(serve, tmp_path, content):
    server = serve(lambda request, times: reply(content, "length", reasoning_content='{"score": 2}'))
    scores = endpoint.score(config(server.url, max_tokens_limit=512), tmp_path, items(1))
    assert np.isnan(scores).all()
    assert [request["max_tokens"] for request in server.requests] == [64, 512]


def test_cut_replies_that_hold_a_score_are_taken_and_content_parts_joined(serve, tmp_path):
    parts = [
        {"type": "text", "text": '{"score": 9, "reason":'},
        {"type": "image"},
        {"type": "text", "text": ' "because'},
    ]
    server = serve(lambda request, times: reply(parts, "length"))
    np.testing.assert_array_equal(endpoint.score(config(server.url), tmp_path, items(1)), [9])
    assert len(server.requests) == 1


def test_odd_texts_and_addresses(serve, tmp_path):
    server = serve(lambda request, times: reply("6"))
    for url in (server.url + "/", server.url + "/chat/completions"):
        np.testing.assert_array_equal(endpoint.score(config(url), tmp_path, [("{q} \ud800", "é\x00")]), [6])
    assert set(server.paths) == {"/v1/chat/completions"} and len(server.requests) == 1
