"""The engine for OpenAI-compatible servers, against a local server that is busy, wrong, slow or cuts answers off."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl.config import Server
from rl.engines import openai
from rl.engines.base import EngineError, Sampling, generate
from rl.engines.openai import OpenAIEngine

pytestmark = pytest.mark.budget(30)


def answer(text, reason="stop"):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@contextmanager
def serving(reply):
    """A server whose `reply(body, nth time this conversation is asked)` gives (status, JSON or bytes, headers)."""
    asked, times, lock = [], Counter(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = body["messages"][-1]["content"]
            with lock:
                times[said] += 1
                asked.append((self.path, dict(self.headers), body))
                nth = times[said]
            status, data, *headers = reply(body, nth)
            payload = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in (headers[0] if headers else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No proxy, and pauses of milliseconds."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(reply, texts=("hello",), sampling=None, **settings):
    """The completions for one-message conversations, and what the server was asked."""
    with serving(reply) as (url, asked):
        engine = OpenAIEngine(Server(**{"url": url, "model": "m", "timeout_s": 5.0, "attempts": 3} | settings))
        prompts = [[{"role": "user", "content": text}] for text in texts]
        sampling = sampling or Sampling(50, 0.5, 0.9)
        return generate(engine, prompts, sampling, list(range(len(texts)))), asked


def test_text_comes_back_and_the_request_says_what_was_asked(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (completion,), ((path, headers, body),) = ask(lambda body, nth: answer("hi there"))
    assert (completion.text, completion.finish_reason, completion.ids) == ("hi there", "stop", [])
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("m", 50, 0.5, 0.9)
    assert body["messages"] == [{"role": "user", "content": "hello"}]


def test_answers_belong_to_their_questions_whatever_order_they_come_in():
    texts = [f"question {i}" for i in range(12)]

    def reply(body, nth):
        number = int(body["messages"][0]["content"].split()[1])
        time.sleep(0.02 * (12 - number) / 12)
        return answer(f"answer {number}")

    completions, asked = ask(reply, texts, parallel=4)
    assert [c.text for c in completions] == [f"answer {i}" for i in range(12)] and len(asked) == 12


def test_no_more_than_parallel_requests_are_under_way():
    now, most, lock = [0], [0], threading.Lock()

    def reply(body, nth):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return answer("x")

    ask(reply, [str(i) for i in range(9)], parallel=3)
    assert most[0] == 3


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": "slow down"}, {"Retry-After": "0"}),
        (429, {"error": "slow down"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        (503, b"busy"),
        (200, b"<html>not JSON"),
        (200, b"[]"),
        (200, {"choices": []}),
        (200, {"error": {"message": "overloaded"}}),
        (200, {"choices": [{"text": "a completion of another kind"}]}),
        (200, {"choices": [{"message": {"content": ["no", "text"]}}]}),
        answer(""),
        answer(None),
    ],
)
def test_what_passes_is_tried_again(trouble):
    (completion,), asked = ask(lambda body, nth: trouble if nth < 3 else answer("at last"))
    assert completion.text == "at last" and len(asked) == 3


@pytest.mark.parametrize("trouble", [(503, b"busy"), (200, {"choices": []}), (200, b"{")])
def test_what_does_not_pass_is_an_error_that_says_what_to_do(trouble):
    with pytest.raises(EngineError, match=r"no answer in 3 tries.*server.attempts"):
        ask(lambda body, nth: trouble)


def test_a_server_that_asks_for_a_pause_gets_it(monkeypatch):
    monkeypatch.setattr(openai, "LONGEST_PAUSE_S", 5.0)
    begun = time.monotonic()
    ask(lambda body, nth: (429, b"", {"Retry-After": "0.3"}) if nth == 1 else answer("x"))
    assert 0.3 <= time.monotonic() - begun < 2


def test_an_answer_that_takes_too_long_is_tried_again():
    def reply(body, nth):
        time.sleep(0.6 if nth == 1 else 0.0)
        return answer("in time")

    (completion,), asked = ask(reply, timeout_s=0.25)
    assert completion.text == "in time" and len(asked) == 2


def test_an_empty_answer_is_believed_in_the_end():
    (completion,), asked = ask(lambda body, nth: answer(""))
    assert (completion.text, completion.finish_reason, len(asked)) == ("", "stop", 3)


def test_a_cut_answer_is_kept_and_the_record_says_so():
    (completion,), asked = ask(lambda body, nth: answer("def f(", "length"))
    assert (completion.text, completion.finish_reason, len(asked)) == ("def f(", "length", 1)
    (completion,), asked = ask(lambda body, nth: answer(None, "length"))  # all tokens went into thinking
    assert (completion.text, completion.finish_reason, len(asked)) == ("", "length", 1)


def test_a_conversation_too_long_for_the_server_ends_there():
    said = {"error": {"message": "This model's maximum context length is 4096 tokens", "code": "x"}}
    (completion,), asked = ask(lambda body, nth: (400, said))
    assert (completion.text, completion.finish_reason, len(asked)) == ("", "context", 1)


def test_parameters_that_a_server_does_not_take_are_left_out(capsys):
    def reply(body, nth):
        if "max_tokens" in body:
            return 400, {"error": {"message": "'max_tokens' is not supported, use 'max_completion_tokens'"}}
        if "temperature" in body:
            return 400, {"error": {"message": "Unsupported value: 'temperature'"}}
        return answer(f"at most {body['max_completion_tokens']}")

    (completion,), asked = ask(reply, attempts=1)
    assert completion.text == "at most 50" and len(asked) == 3 and "top_p" in asked[-1][2]
    assert "takes no max_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "words"), [(401, r"\$OPENAI_API_KEY"), (404, "server.url"), (400, "nonsense"), (403, "key")]
)
def test_what_will_not_pass_is_said_at_once_and_never_with_the_key(monkeypatch, status, words):
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    with pytest.raises(EngineError, match=words) as refusal:
        ask(lambda body, nth: (status, {"error": "nonsense"}))
    assert f"HTTP {status}" in str(refusal.value) and "very-secret" not in str(refusal.value)


def test_nobody_at_the_address():
    engine = OpenAIEngine(Server(url="http://127.0.0.1:9/v1", model="m", attempts=2))
    with pytest.raises(EngineError, match=r"127.0.0.1:9/v1.*no answer in 2 tries"):
        generate(engine, [[{"role": "user", "content": "x"}]], Sampling(5), [0])


def test_a_server_must_be_named_and_has_no_weights_to_change():
    with pytest.raises(EngineError, match=r"server.url and server.model"):
        OpenAIEngine(Server(url="http://localhost/v1"))
    with pytest.raises(EngineError, match="can't be changed"):
        OpenAIEngine(Server(url="http://localhost/v1", model="m")).push(None)


def test_a_server_that_sends_blanks_for_ever_is_given_up(tmp_path):
    """The socket's timeout begins anew with every byte."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip():
        while not stop.is_set():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        break

    threading.Thread(target=drip, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    engine = OpenAIEngine(Server(url=address, model="m", attempts=1, timeout_s=0.5))
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"no whole answer within 0\.5 s.*server\.timeout_s"):
        generate(engine, [[{"role": "user", "content": "hi"}]], Sampling(8), [1])
    assert time.monotonic() - begun < 5
    stop.set()
    listener.close()
