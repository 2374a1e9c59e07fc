"""What must not be shown of documents, environments, addresses and headers."""

from hypothesis import given
from hypothesis import strategies as st

from hearth.engine.redact import Redactor
from hearth.scrub import address_secrets, header_secrets, scrub, secret_variables, shown_address

SECRET = "Zx9-planted-Key!q7"
PLAIN = st.text(st.characters(codec="utf-8"), max_size=20)
DOCUMENTS = st.recursive(
    st.one_of(
        st.just(SECRET), PLAIN.map(lambda text: f"{text}{SECRET}{text}"), PLAIN, st.integers(), st.none()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(PLAIN, inner, max_size=4)),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_a_known_secret_survives_nowhere(document):
    assert SECRET not in repr(scrub(document, Redactor([SECRET])))


def test_what_stands_under_a_secrets_name_is_masked_and_the_rest_stays():
    document = {"api_key": "abcd", "hf-token": "x1", "password": 12, "api_key_file": "/p", "max_tokens": 8}
    assert scrub({"a": [document]}, Redactor([])) == {
        "a": [{"api_key": "***", "hf-token": "***", "password": "***", "api_key_file": "/p", "max_tokens": 8}]
    }


def test_secret_variables_are_known_by_their_names():
    found = secret_variables(
        {
            "HF_TOKEN": "plainvalue1",
            "MY_API_KEY": "abcdefgh",
            "PATH": "/bin:/usr/bin",
            "A_SECRET": "/run/a/file",
        }
    )
    assert sorted(found) == ["abcdefgh", "plainvalue1"]


def test_a_webhooks_address_is_shown_by_its_host_alone():
    url = "https://hooks.example:8443/services/T0AAAAAAA/B0BBBBBBB/cGxhbnRlZA12?key=K3yK3yK3yK3y"
    assert shown_address(url) == "https://hooks.example:8443/***"
    assert shown_address("http://[::1]:9/x") == "http://[::1]:9/***"
    redact = Redactor(address_secrets(url))
    for said in (
        url,
        "at /services/T0AAAAAAA/B0BBBBBBB/cGxhbnRlZA12?key=K3yK3yK3yK3y",
        "cGxhbnRlZA12",
        "K3yK3yK3yK3y",
    ):
        assert "***" in redact(said)
        assert "cGxhbnRlZA12" not in redact(said)
        assert "K3yK3yK3yK3y" not in redact(said)


def test_ordinary_words_of_an_address_are_no_secrets():
    assert address_secrets("http://127.0.0.1:8080/notifications") == [
        "http://127.0.0.1:8080/notifications",
        "/notifications",
    ]


def test_a_headers_credential_is_secret_without_its_scheme_too():
    assert header_secrets("Bearer abcdefgh12") == ["Bearer abcdefgh12", "abcdefgh12"]
