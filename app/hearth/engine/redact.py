"""Takes secrets out of log text: the configured ones, and whatever looks like one.

SGLang prints `api_key` and `admin_api_key` in clear in its `server_args=` line and in `/server_info`
(only watermark fields are redacted there, as of 0.5.23).

Works on whole chunks: a rule runs only where its trigger, a plain substring, occurs, and its expression
starts with literal text, so that an ordinary log costs little more than a few substring searches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import overload
from urllib.parse import quote, quote_plus

MASK = b"***"
MIN_SECRET = 4
LONGEST = 1 << 15
"""No rule matches more bytes than this; a longer secret is masked only where it is a configured one."""

# A rule matches lower-cased text; its one group that took part is the secret, the rest of the match stays.
_SPACE = rb"[ \t]{0,4}"
# What says that nothing is set, what is masked already, and the placeholders of usage texts and signatures.
_UNSET = (
    rb"""(?!b?\\{0,8}["']?(?:none|null|true|false|str|optional|(?:admin_)?api_key|ssl_keyfile_password|\*+)"""
    rb"""(?:[\s,;:)}\]\\"'&\[|]|$))"""
)
_QUOTED = (
    rb"""(?:b?"((?:[^"\\\r\n]|\\.){1,16384})|b?'((?:[^'\\\r\n]|\\.){1,16384})"""
    rb"""|\\{1,8}["']([^\r\n]{1,16384}?)\\{1,8}["'])"""
)
_BARE = rb"""([^\s,;&"'\\)\]}]{1,16384})"""
_NOT_A_COUNT = rb"""(?![\d.]+(?:[\s,;)\]}]|$))([^\s,;&"'\\)\]}]{8,16384})"""
_QUOTE_END = rb"""\\{0,8}["']"""
_EQUAL = _QUOTE_END + rb"?" + _SPACE + rb"[=:]" + _SPACE + _UNSET
# `'--api-key', 'X'` in an argument list, `(b'x-api-key', b'X')` in a list of headers.
_COMMA = _QUOTE_END + _SPACE + rb",\s{0,80}" + _UNSET
_API_KEY = rb"api[_-]?key"
_PASSWORD = rb"pass(?:word|wd|phrase)"
_SECRET = rb"secret(?:[_-]access)?(?:[_-]key)?"
# `#new-token: 6`, `token usage: 0.1`, `eos_token='</s>'` and the like are no secrets.
_TOKEN = (
    rb"token(?:(?<![a-z0-9_#/-]token)|(?<=hf_token)|(?<=hub_token)|(?<=auth[_-]token)"
    rb"|(?<=access[_-]token)|(?<=api[_-]token)|(?<=bearer[_-]token)|(?<=refresh[_-]token))"
)
_FLAG = (
    rb"--(?:(?:[a-z0-9]{1,20}-){0,4}(?:api-key|password|passphrase|secret)"
    rb"|(?:hf-|hub-|auth-|access-|api-)?token)[ \t]{1,8}" + _UNSET
) + rb"""(?!-)["']?([^\s"'\\]{1,16384})"""
_SCHEME = rb"(?:bearer|basic|digest|token)[ \t]{1,4}"
_AUTHORIZATION = (
    rb"authorization" + _QUOTE_END + rb"?" + _SPACE + rb"[:=,]" + _SPACE + rb"(?:b?" + _QUOTE_END + rb")?"
) + (rb"(?:" + _SCHEME + rb""")?(?!""" + _SCHEME + rb""")([^\s"'\\,]{4,16384})""")

_ANY = rb"(?:" + _QUOTED + rb"|" + _BARE + rb")"
_TOKEN_QUOTED = (_TOKEN + _EQUAL + _QUOTED, rb"token(?<=-token)" + _COMMA + _QUOTED)
_RULES = {
    trigger: [re.compile(pattern) for pattern in patterns]
    for trigger, patterns in {
        b"api": (_API_KEY + _EQUAL + _ANY, _API_KEY + _COMMA + _QUOTED),
        b"pass": (_PASSWORD + _EQUAL + _ANY, _PASSWORD + _COMMA + _QUOTED),
        b"secret": (_SECRET + _EQUAL + _ANY,),
        b"token=": (_TOKEN + rb"=" + _UNSET + rb"(?:" + _QUOTED + rb"|" + _NOT_A_COUNT + rb")",),
        b'token"': _TOKEN_QUOTED,
        b"token'": _TOKEN_QUOTED,
        b"token\\": _TOKEN_QUOTED,
        b"--": (_FLAG,),
        b"authorization": (_AUTHORIZATION,),
        b"bearer": (rb"bearer[ \t]{1,4}(?=[a-z._~+/=-]{0,99}\d|[a-z._~+/=-]{24})([a-z0-9._~+/=-]{8,16384})",),
        b"hf_": (rb"hf_(?<![a-z0-9_]hf_)([a-z0-9]{20,256})",),
        b"sk-": (rb"sk-(?<![a-z0-9_-]sk-)([a-z0-9_-]{16,512})",),
        b"nvapi-": (rb"nvapi-([a-z0-9_-]{16,512})",),
        b"ghp_": (rb"ghp_([a-z0-9]{20,256})",),
        b"github_pat_": (rb"github_pat_([a-z0-9_]{20,256})",),
        b"://": (rb"""://[^\s/@:"']{0,256}:([^\s/@"']{1,1024})@""",),
    }.items()
}
_LOOKBEHIND = 16


class Redactor:
    """Masks the values in `secrets` (of 4 characters or more, in every spelling a log may have) and
    everything that looks like a secret. Call it with bytes or text; it returns the same type."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = {form for secret in secrets for form in _spellings(secret)}
        self._known = tuple(
            sorted((form.encode("utf-8", "surrogateescape") for form in spellings), key=_longest)
        )
        self._pattern = (
            re.compile(b"|".join(re.escape(form) for form in self._known)) if self._known else None
        )
        self.longest = max([LONGEST, *map(len, self._known)])
        """The longest match (bytes): what is cut further than this from its end is cut safely."""

    @overload
    def __call__(self, data: bytes) -> bytes: ...
    @overload
    def __call__(self, data: str) -> str: ...
    def __call__(self, data: bytes | str) -> bytes | str:
        if isinstance(data, bytes):
            return self._redact(data)
        plain = data.encode("utf-8", "surrogatepass")
        masked = self._redact(plain)
        return data if masked == plain else masked.decode("utf-8", "replace")

    def safe_cut(self, data: bytes, cut: int) -> int:
        """The nearest place at or before `cut` where no match is cut in two; `cut` must be at least
        `longest` bytes before the end of `data`."""
        low = data.lower()
        spans = [match.span() for pattern in _active(low) for match in pattern.finditer(low)]
        if self._pattern is not None:
            spans += [match.span() for match in self._pattern.finditer(data)]
        for begin, end in sorted(spans, reverse=True):
            if begin - _LOOKBEHIND < cut < end:
                cut = max(0, begin - _LOOKBEHIND)
        return cut

    def unfinished(self, data: bytes) -> bytes:
        """Redact text that stops in the middle of a line: the beginning of a configured secret goes too."""
        for form in self._known:
            for size in range(min(len(form), len(data)), MIN_SECRET - 1, -1):
                if data.endswith(form[:size]):
                    return self._redact(data[: len(data) - size] + MASK)
        return self._redact(data)

    def _redact(self, data: bytes) -> bytes:
        if self._pattern is not None and any(form in data for form in self._known):
            data = self._pattern.sub(MASK, data)
        low = data.lower()
        spans = [m.span(m.lastindex or 0) for pattern in _active(low) for m in pattern.finditer(low)]
        return _mask(data, sorted(spans)) if spans else data


def _active(low: bytes) -> list[re.Pattern[bytes]]:
    return [pattern for trigger, patterns in _RULES.items() if trigger in low for pattern in patterns]


def _mask(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    """`data` with every span (sorted; they may overlap) replaced."""
    parts = []
    done = 0
    for begin, end in spans:
        if begin >= done:
            parts += [data[done:begin], MASK]
        done = max(done, end)
    return b"".join([*parts, data[done:]])


def _longest(form: bytes) -> tuple[int, bytes]:
    return (-len(form), form)


def _spellings(secret: str) -> set[str]:
    """A secret and each of its lines, as they look raw, in repr, JSON and URLs, and in repr of those."""
    values = {secret, secret.strip()}
    values |= {line.strip() for line in secret.splitlines() if len(line.strip()) >= 2 * MIN_SECRET}
    values = {value for value in values if len(value) >= MIN_SECRET}
    for _ in range(2):
        values |= {form for value in values for form in _escaped(value)}
    urls = {form for value in values for form in _url_encoded(value)}
    return values | urls


def _escaped(value: str) -> set[str]:
    forms = {repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    # A text with both kinds of quotes is shown with its single ones escaped.
    return {*forms, repr(value + "'\"")[1:-4], value.replace("/", "\\/")}


def _url_encoded(value: str) -> set[str]:
    try:
        forms = {quote(value), quote(value, safe=""), quote_plus(value)}
    except UnicodeEncodeError:
        return set()
    return forms | {re.sub("%[0-9A-F]{2}", lambda m: m.group().lower(), form) for form in forms}
