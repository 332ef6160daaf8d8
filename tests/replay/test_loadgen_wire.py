import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.completion_stream import CompletionStream, explain_error
from replay.http1 import HttpFormatError, ResponseDecoder

# As vLLM 0.32 sends them: the text is empty with a byte tokenizer.
TOKEN = (
    b'data: {"id":"cmpl-b5368f4222e0064a","object":"text_completion","created":1796027011,"model":"tiny","choices":'
    b'[{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    b'"token_ids":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-b5368f4222e0064a","object":"text_completion","created":1796027011,"model":"tiny","choices":[],'
    b'"usage":{"prompt_tokens":7,"total_tokens":12,"completion_tokens":3},"system_fingerprint":"vllm-0.32.0"}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = TOKEN * 3 + USAGE + DONE


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%X;ext=1\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: Chunked\r\n\r\n"


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_a_chunked_body_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    decoder = ResponseDecoder()
    wire = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunked(TOKEN, TOKEN * 2, USAGE, DONE)
    body = b"".join(decoder.feed(piece) for piece in pieces(wire, cuts))
    assert body == STREAM
    assert (decoder.status, decoder.complete, decoder.keep_alive) == (200, True, True)


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_events_are_the_same_however_the_body_is_cut(cuts: list[int]) -> None:
    for body in (STREAM, STREAM.replace(b"\n", b"\r\n"), b": ping\n\n" + STREAM):
        stream = CompletionStream()
        for at_s, piece in enumerate(pieces(body, cuts)):
            stream.feed(piece, float(at_s))
        assert (len(stream.itl_s), stream.done, stream.error) == (2, True, None)
        assert (stream.prompt_tokens, stream.completion_tokens) == (7, 3)
        assert stream.first_token_at_s is not None
        assert stream.last_token_at_s == stream.first_token_at_s + sum(stream.itl_s)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_garbage_is_refused_or_incomplete_but_never_crashes(data: bytes, cuts: list[int]) -> None:
    for prefix in (b"", b"HTTP/1.1 200 OK\r\n", HEAD):
        decoder, stream = ResponseDecoder(), CompletionStream()
        try:
            for piece in pieces(prefix + data, cuts):
                stream.feed(decoder.feed(piece), 0.0)
        except HttpFormatError:
            continue


@pytest.mark.parametrize(
    ("wire", "body", "complete", "keep_alive"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc", b"abc", True, True),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nab", b"ab", False, True),
        (b"HTTP/1.1 500\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", b"", True, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", True, False),
        (HEAD + b"1\r\nx\r\n0\r\nTrailer: 1\r\n\r\n", b"x", True, True),
        (HEAD + b"1\r\nx\r\n0\r\n", b"x", False, True),
    ],
)
def test_bodies_end_where_they_say(wire: bytes, body: bytes, complete: bool, keep_alive: bool) -> None:
    decoder = ResponseDecoder()
    assert decoder.feed(wire) == body
    assert (decoder.complete, decoder.keep_alive) == (complete, keep_alive)


def test_a_body_without_length_ends_with_the_connection() -> None:
    decoder = ResponseDecoder()
    assert decoder.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    assert not decoder.complete
    decoder.end_of_input()
    assert decoder.complete
    assert not decoder.keep_alive


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        HEAD + b"-1\r\n",
        HEAD + b"fffffff\r\n",
        HEAD + b"\r\n",
    ],
)
def test_what_is_not_http_is_refused(wire: bytes) -> None:
    with pytest.raises(HttpFormatError):
        ResponseDecoder().feed(wire)


def test_text_that_looks_like_protocol_is_text() -> None:
    event = {"choices": [{"text": 'data: [DONE] "usage":{ {"error": \n\n "choices":[] '}]}
    stream = CompletionStream()
    stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n", 1.0)
    assert (stream.first_token_at_s, stream.done, stream.error, stream.completion_tokens) == (1.0, False, None, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"The model `x` does not exist.","code":404}}', "The model `x` does not exist."),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"message":"old style"}', "old style"),
        (b'{"detail":"Not Found"}', '{"detail":"Not Found"}'),
        (b"\xffplain", "\ufffdplain"),
        (b"", ""),
    ],
)
def test_an_error_answer_is_explained_whatever_its_shape(body: bytes, message: str) -> None:
    assert explain_error(body) == message
