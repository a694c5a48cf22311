"""What looks like a password or key, by its name or by its form; and commands and texts without them.

The one rule for everything that is recorded: the journal's writer passes every entry through `redact_values`. A
name is read word by word, so that `hf_token` and `apiKey` are secrets, and `max_tokens` and `tokenizer` are not. What is hidden
in a command reads `***`; the names of its arguments stay, so that a person knows what to give again (`hidden_arguments`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError

MASK = "***"
SECRET_PLACE = re.compile(r"(env|file):(.+)")  # where a secret stands, instead of the secret
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_ENDS = ("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "token")
_NAMES = {"auth", "bearer", "pwd"}
_PAIRS = {
    *(("api", "key"), ("api", "keys"), ("access", "key"), ("private", "key"), ("secret", "key"), ("license", "key")),
    *(("db", "pass"), ("user", "pass"), ("smtp", "pass")),
}
# what says that a `token` is a piece of text: `pad_token`, `token_id`, `mask_token`, `bos-token`
_ABOUT_TEXT = {
    *("pad", "bos", "eos", "unk", "sep", "cls", "mask", "image", "special", "end", "start", "stop", "id", "ids", "type"),
    *("types", "length", "limit", "budget", "dropout", "count", "level", "classes", "embedding", "weight"),
}
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{12,}|sk-(?=[\w-]{0,99}\d)[A-Za-z0-9_-]{12,}|AIza[\w-]{30,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_[A-Za-z0-9_]{12,}"
    r"|AKIA[A-Z0-9]{12,}|glpat-[A-Za-z0-9_-]{12,}|xox[abprs]-[A-Za-z0-9-]{10,}|nvapi-[A-Za-z0-9_-]{12,}"
    r"|wandb_v1_[A-Za-z0-9_-]{12,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
)
# A name begins where no letter stands before it, and is of a bounded length: a long word is read once, not from each letter
_URL_PASSWORD = re.compile(r"(?<!\w)(\w+://[^\s:/@]*):[^\s@/]+@")
_URL_FIELD = re.compile(r"([?&;])([\w.-]+)=([^\s&;#]+)")
_SIGNED = re.compile(r"(?:^|-)(?:sig|signature|credential)$", re.IGNORECASE)  # who holds the URL may read the object
_BEARER = re.compile(r"\b((?:bearer|basic)\s+)(?=[\w.~+/-]{0,99}[\d=])[\w.~+/=-]{8,}", re.IGNORECASE)
_WEBHOOK = re.compile(r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/)[\w/-]+")
_AZURE = re.compile(r"\b((?:Account|SharedAccess)Key=)[\w+/=-]{16,}", re.IGNORECASE)
_NETRC = re.compile(r"\b(machine\s+\S+\s+(?:login\s+\S+\s+)?password\s+)\S+")
# forty hexadecimal digits are a commit, too: only where W&B is named before them
_WANDB = re.compile(r"""(wandb[\w.-]{0,24}["']?(?:\s*[:=]|\s+(?:key|is))*\s*["']?)\b[0-9a-f]{40}\b""", re.IGNORECASE)
_PEM_LINES = r"[A-Za-z0-9+/=]{4,}"  # of a key that was cut, too: the last lines of a log may begin or end within it
_PEM = re.compile(
    rf"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]{{0,20000}}?-----END [A-Z ]*PRIVATE KEY-----|(?:(?:\\n|\s)+{_PEM_LINES})*)"
    rf"|(?:{_PEM_LINES}\s+)+-----END [A-Z ]*PRIVATE KEY-----"
)
_FIELD = re.compile(r"""(["']?)([A-Za-z_][\w.-]{0,99})\1(\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,;&"'{}\[\]]+)""")

_LITERAL = re.compile(r"""([A-Za-z_][\w.-]{0,99})(["']?\]?\s*[:=]\s*)(["'])(?!\*\*\*)[^"'\n]{6,}\3""")


def looks_secret(name: str) -> bool:
    """Whether something of this name may be a password or key: `hf_token` and `apiKey` may, `max_tokens` may not."""
    words = [word.lower() for word in _WORDS.findall(name)]
    about_text = bool(_ABOUT_TEXT & set(words))
    for word in words:
        end = next((end for end in _ENDS if word.endswith(end)), None)
        if word in _NAMES or (end and not (end == "token" and (about_text or word[: -len(end)] in _ABOUT_TEXT))):
            return True
    return words == ["pass"] or any(pair in _PAIRS for pair in pairwise(words))


def holds_secret(text: str) -> bool:
    """Whether a token of a known form, a password in a URL or a header of authorization stands in this text."""
    return redact(text) != text


def redact(text: str) -> str:
    """The text without tokens of known forms, private keys, passwords in URLs, their queries and netrc lines, and headers of
    authorization. It keeps its lines.
    """
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", _FORMS.sub(MASK, text))
    if "://" in text:
        text = _URL_FIELD.sub(lambda m: f"{m[1]}{m[2]}={MASK}" if _SIGNED.search(m[2]) or looks_secret(m[2]) else m[0], text)
    if "PRIVATE KEY-----" in text:
        text = _PEM.sub(lambda m: "\n".join([MASK] * (m[0].count("\n") + 1)), text)
    for form in (_BEARER, _WEBHOOK, _AZURE, _NETRC, _WANDB):
        text = form.sub(rf"\1{MASK}", text)
    return text


def redact_values(value: Any) -> Any:
    """A value of JSON with every text redacted; a list of texts as the lines of one text."""
    if isinstance(value, str):
        return _redact_path(value) if _is_path(value) else redact(value)
    if isinstance(value, Mapping):
        return {key: _redact_named(str(key), one) for key, one in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if not value or not all(isinstance(one, str) for one in value):
        return type(value)(redact_values(one) for one in value)
    lines = redact("\n".join(value)).split("\n")
    found, at = [], 0
    for one in value:
        count = one.count("\n") + 1
        found.append(_redact_path(one) if _is_path(one) else "\n".join(lines[at : at + count]))
        at += count
    return type(value)(found)


def _redact_named(name: str, value: Any) -> Any:
    """A W&B key is known by the name beside it alone."""
    if isinstance(value, str) and _WANDB.sub(MASK, f"{name}={value}") == MASK:
        return MASK
    return redact_values(value)


def _is_path(text: str) -> bool:
    """Whether a text may be one path."""
    return "/" in text and not any(sign in text for sign in " =\n\t") and "://" not in text


def _redact_path(text: str) -> str:
    """A path without tokens. A directory may have the form of one (`sk-2026-11-28`): only what looks drawn by chance counts."""
    return _WEBHOOK.sub(rf"\1{MASK}", _FORMS.sub(lambda found: MASK if _is_drawn(found[0]) else found[0], text))


def _is_drawn(text: str) -> bool:
    """Whether digits and letters of both cases are mixed, as in a token."""
    return all(re.search(kind, text) for kind in ("[0-9]", "[a-z]", "[A-Z]"))


def redact_source(text: str) -> str:
    """Source code or a patch without known tokens and without quoted texts that are given to a name of a secret."""
    return _LITERAL.sub(lambda m: f"{m[1]}{m[2]}{m[3]}{MASK}{m[3]}" if looks_secret(m[1]) else m[0], redact(text))


def redact_command(command: Sequence[str]) -> list[str]:
    """The command, word for word as long, with the values of secret options and what has the form of a secret as `***`."""
    out: list[str] = []
    for before, word in pairwise(["", *command]):
        is_code = before in ("-c", "-lc")  # of a shell or of Python: a value ends where the next word begins
        if looks_secret(before) and before.startswith("-") and "=" not in before and not _is_option(word):
            out.append(MASK)
        elif (name := _assigned(word)) and looks_secret(name) and not is_code:
            out.append(f"{name}={MASK}")
        else:
            out.append(redact(_FIELD.sub(_hide_field, word) if is_code or _is_text(word) else word))
    return out


def hidden_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Of a recorded command, the arguments that were hidden: the option's name, or the word where it has none.

    Whoever starts a recorded command again must ask for these: `***` is not what the launch was given.
    """
    found = []
    for before, word in pairwise(["", *command]):
        if MASK not in word:
            continue
        name, equals, _ = word.partition("=")
        found.append(before if word == MASK and before.startswith("-") else name if equals else word)
    return tuple(dict.fromkeys(found))


def _is_option(word: str) -> bool:
    return word.startswith("--") or re.fullmatch(r"-[A-Za-z]", word) is not None


def _assigned(word: str) -> str:
    """`--api-key` of `--api-key=abc`; empty where nothing is assigned."""
    name, _, value = word.partition("=")
    return name if value and re.fullmatch(r"[-+]*\w[\w./-]*", name) else ""


def _is_text(word: str) -> bool:
    """Whether a word holds fields of its own: JSON, a list of settings, a line of a shell."""
    return any(sign in word for sign in " {,;\n") and len(word) < 100_000


def _hide_field(match: re.Match[str]) -> str:
    if not looks_secret(match[2]):
        return match[0]
    quote = match[4][0] if match[4][0] in "\"'" else ""
    return f"{match[1]}{match[2]}{match[1]}{match[3]}{quote}{MASK}{quote}"


def secret_of(given: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value that `env:NAME` or `file:PATH` names, or the text itself. Raises `ChronicleError` where there is none."""
    found = SECRET_PLACE.fullmatch(given)
    if found is None:
        return given
    if found[1] == "env":
        value = environ.get(found[2], "").strip()
        if not value:
            raise ChronicleError(f"the variable {found[2]} is not set")
        return value
    try:
        value = Path(found[2]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ChronicleError(f"cannot read `{found[2]}`: {getattr(problem, 'strerror', None) or problem}") from problem
    if not value:
        raise ChronicleError(f"`{found[2]}` is empty")
    return value
