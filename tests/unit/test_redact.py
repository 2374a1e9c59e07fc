"""Secrets leave the log, harmless text stays."""

import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.engine.redact import Redactor

PLAIN = Redactor(())
HF = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"


# ruff: noqa: E501
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "server_args=ServerArgs(model_path='m', api_key='s3', admin_api_key=\"t4\", tokenizer_path='t')",
            "server_args=ServerArgs(model_path='m', api_key='***', admin_api_key=\"***\", tokenizer_path='t')",
        ),
        ("{'api_key': 's3', 'ssl_keyfile_password': 'q q'}", "{'api_key': '***', 'ssl_keyfile_password': '***'}"),
        ("api_key='it\\'s', port=1", "api_key='***', port=1"),
        ("'--api-key', 'X', '--admin-api-key', 'Y', '--port', '1'",
         "'--api-key', '***', '--admin-api-key', '***', '--port', '1'"),
        ('["--api-key","X","--tp","8"]', '["--api-key","***","--tp","8"]'),
        ("sglang serve --api-key X --port 1 --admin-api-key=Y", "sglang serve --api-key *** --port 1 --admin-api-key=***"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("authorization: Basic QWxhZGRpbg==", "authorization: Basic ***"),
        ("[(b'authorization', b'Bearer correct')]", "[(b'authorization', b'Bearer ***')]"),
        ("(b'x-api-key', b'correct')", "(b'x-api-key', b'***')"),
        ("sent Bearer eyJhbGciOi.J9 to it", "sent Bearer *** to it"),
        ('{"token": "abc", "n": 1}', '{"token": "***", "n": 1}'),
        ('"{\\"api_key\\": \\"abc\\", \\"token\\": \\"d\\"}"', '"{\\"api_key\\": \\"***\\", \\"token\\": \\"***\\"}"'),
        (f"using {HF} for it", "using hf_*** for it"),
        ("Incorrect API key provided: sk-proj-abcdefghijklmnop.", "Incorrect API key provided: sk-***."),
        ("HF_TOKEN=foobarbaz HOME=/x", "HF_TOKEN=*** HOME=/x"),
        ("--hf-token foobarbaz", "--hf-token ***"),
        ("http://user:pw@host/x?api_key=33&b=1", "http://user:***@host/x?api_key=***&b=1"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(text: str, expected: str) -> None:
    assert PLAIN(text) == expected
    assert PLAIN(expected) == expected
    assert PLAIN(text.encode()) == expected.encode()


@pytest.mark.parametrize(
    "text",
    [
        "max_total_num_tokens=16384, tokenizer_path='/m/tokenizer', tokens=5, token=7, num_token=12345678",
        "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #queue-req: 0",
        "Decode batch, gen throughput (token/s): 12.3, cuda graph: True",
        "eos_token='</s>', 'pad_token': '<pad>', bos_token_id=1, skip_tokenizer_init=False",
        "api_key=None, admin_api_key=None, 'api_key': None, \"api_key\": null, api_key='***'",
        "[--api-key API_KEY] [--admin-api-key ADMIN_API_KEY] [--ssl-keyfile-password SSL_KEYFILE_PASSWORD]",
        "--max-tokens 100 --stop-token-ids 5 --bucket-time-to-first-token 1 2",
        "def f(api_key: str = None, password: Optional[str] = None)",
        "task-12345678901234567890 disk-aaaaaaaaaaaaaaaaaaaa hf_quantizer hf_config",
        "Invalid api_key provided; the bearer authentication failed",
        "see https://host:8080/path and http://a/b@c",
    ],
)
def test_harmless_text_stays(text: str) -> None:
    assert PLAIN(text) == text


OTHER = st.text(st.characters(exclude_characters="Z"), max_size=20)


@given(st.text(max_size=40), OTHER, OTHER)
def test_a_configured_secret_never_shows_in_any_spelling(rest: str, before: str, after: str) -> None:
    secret = f"Zq{rest}9Z"
    redactor = Redactor([secret])
    forms = [
        secret,
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
    ]
    forms += [quote(secret, safe=""), quote_plus(secret), repr(json.dumps(secret))[2:-2]]
    for form in forms:
        assert "Z" not in redactor(before + form + after)


@given(st.binary(max_size=300))
def test_any_bytes_survive(data: bytes) -> None:
    assert PLAIN(b"\xff\x00\n" + data).startswith(b"\xff\x00\n")
    assert b"abcd" not in Redactor(["abcd"])(data + b"abcd" + data)


def test_short_secrets_are_left_alone_and_lines_of_a_key_file_are_not() -> None:
    assert Redactor(["abc", ""])("abc") == "abc"
    key = "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA\n-----END KEY-----\n"
    assert "MIIEpAIBAAKCAQEA" not in Redactor([key])(key)


def test_lone_surrogates_and_same_type_back() -> None:
    assert PLAIN("\ud800 x") == "\ud800 x"
    assert "pw" not in Redactor(["pwpw"])("\ud800 pwpw")


@given(st.integers(0, 200))
def test_a_cut_never_parts_a_match(cut: int) -> None:
    redactor = Redactor(["Correct-Horse"])
    data = (
        b"x" * 20
        + b" --api-key 'abcdefgh' "
        + b"y" * 20
        + b"Correct-Horse"
        + b"z" * 20
        + b" "
        + HF.encode()
        + b" " * 90
    )
    cut = redactor.safe_cut(data, cut)
    assert redactor(data[:cut]) + redactor(data[cut:]) == redactor(data)
