"""HTML pages that travel: escaped, offline, without any path of this machine.

text            anything from outside as HTML text, with nothing invisible in it
number          a measured number, short
token_strip     tokens in a row, shaded
embed_json      values as strict JSON that may stand inside a script
policy          the tag that forbids a browser every fetch and every script but the given ones
assemble        a whole page
addresses       what a page would load
write_page      a page to a file: whole, offline and free of this machine's folders, or not at all
"""

import json
import math
import re
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from vlmlab.errors import VlmlabError
from vlmlab.trace import disk_errors

_SCRIPT = re.compile(r"(<script\b[^>]*>)(.*?)(</script\s*>)", re.IGNORECASE | re.DOTALL)


def text(value: object) -> str:
    """Anything from outside as HTML text: what is invisible becomes an escape such as `\\x1b` or `\\u202e`.

    That holds for controls, line breaks too, and for zero-width, bidi-control, private-use and half characters. Text
    with right-to-left letters is isolated, so that it cannot reorder what stands around it.

    Args: value: anything; its str is shown. Returns: HTML for an element's content, which any encoding takes.
    """
    shown = _visible(value)
    right_to_left = any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in shown)
    return f"<bdi>{shown}</bdi>" if right_to_left else shown


def _visible(value: object) -> str:
    def one(character: str) -> str:
        unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        return character.encode("unicode_escape").decode() if unseen else character

    return escape("".join(map(one, str(value))))


def number(value: float | None, digits: int = 3) -> str:
    """A measured number, short.

    Args: value: number, or None where there is none. digits: significant ones. Returns: text; "n/a" unless finite.
    """
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def token_strip(words: Sequence[str], shades: Sequence[float], mark: int | None = None) -> str:
    """Tokens in a row, each on a shade of orange, one of them framed.

    Args: words: tokens as text, from outside. shades: 0 (none) to 1 (full) for each. mark: index to frame, or None.
    Returns: HTML.
    """
    spans = []
    for k, (word, shade) in enumerate(zip(words, shades, strict=True)):
        frame = "outline: 2px solid #c0392b; " if k == mark else ""
        style = f"{frame}background: rgba(211, 84, 0, {min(max(shade, 0.0), 1.0):.2f})"
        spans.append(f'<span style="{style}" title="step {k}">{text(word).replace(" ", "&nbsp;")}</span>')
    return f'<div style="font-family: monospace; line-height: 1.7">{"<wbr>".join(spans)}</div>'


def embed_json(value: Any) -> str:
    """Values as strict JSON that may stand inside a script element; numbers that are not finite become null.

    Args: value: nested dicts, lists, tuples, texts and numbers. Returns: JSON in ASCII, without `<`, `>` and `&`.
    """
    strict = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", strict)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def policy(scripts: Sequence[str] = ()) -> str:
    """The tag that forbids a browser every fetch and every script but the given ones.

    Args: scripts: their exact texts. Returns: HTML for the head, before anything it shall bind.
    """
    allowed = " ".join([*map(_hash, scripts), "'unsafe-eval'"]) if scripts else "'none'"
    rules = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src {allowed}"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(sha256(_encoded(script)).digest()).decode()}'"


def _encoded(page: str) -> bytes:
    return page.encode(errors="backslashreplace")  # half a character has no UTF-8


def assemble(title: str, body: str, style: str = "", scripts: Sequence[str] = (), lang: str = "en") -> str:
    """A whole page that may run the given scripts and load nothing.

    Args: title: text. body: HTML. style: CSS. scripts: JavaScript, run in this order after the body. lang: of the text.
    Returns: page. Raises: ValueError: a style or script would end its own element, or a browser would read another text
    than the one that was hashed.
    """
    for script in scripts:
        if re.search(r"</script|<!--|[\r\0]", script, re.IGNORECASE):
            raise ValueError("a script of a page may hold no </script, <!--, carriage return or NUL")
    if re.search("</style", style, re.IGNORECASE):
        raise ValueError("the style of a page may hold no </style")
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="{_visible(lang)}">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            policy(scripts),
            f"<title>{_visible(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            body,
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>\n",
        )
    )


def addresses(page: str) -> list[str]:
    """Addresses a browser would load while showing a page: sources, style sheets and CSS urls, not links to click.

    Args: page: HTML. Returns: addresses in order.
    """
    patterns = (
        r"<(?:script|img|iframe|audio|video|source|embed)[^>]*\ssrc\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)",
        r"<link[^>]*\shref\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)",
        r"url\(\s*[\"']?((?:https?:)?//[^\"')\s]+)",
        r"@import\s+[\"']((?:https?:)?//[^\"']+)",
        r"\bimport\s*\(?\s*[\"']((?:https?:)?//[^\"']+)",
    )
    return [match for pattern in patterns for match in re.findall(pattern, page, flags=re.IGNORECASE)]


def write_page(page: str, file: Path, private: Mapping[str, str] | None = None) -> Path:
    """Write a page that loads nothing and names no folder of this machine, or nothing at all.

    What scripts hold is not searched for addresses, since libraries name many that they never load; the page's policy
    forbids them all.

    Args: page: HTML. file: HTML file to write. private: texts of this machine and what replaces them.
    Returns: file. Raises: VlmlabError: disk full, the page would load something, or it names this machine's folders.
    """
    page = _replaced(page, private or {})
    loaded = addresses(_SCRIPT.sub(r"\1\3", page))
    if loaded:
        raise VlmlabError(f"{file.name} would load {loaded[0]} from a network; reports must open offline")
    folders = [where for where in (str(Path.home()), str(Path.cwd()), sys.prefix) if len(where) > 1]
    if any(spelling in page for where in folders for spelling in _spellings(where)):
        raise VlmlabError(f"{file.name} would name a folder of this machine; reports travel. Nothing was written")
    partial = file.with_name(f".{file.name}.partial")
    with disk_errors():
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(_encoded(page))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return file


def _spellings(value: str) -> tuple[str, str, str]:
    """How a text stands in HTML, in a script's JSON and in what nobody escaped."""
    return _visible(value), embed_json(value)[1:-1], value


def _replaced(page: str, private: Mapping[str, str]) -> str:
    before = [script for _, script, _ in _SCRIPT.findall(page)]
    for secret, public in private.items():
        for old, new in zip(_spellings(secret), _spellings(public), strict=True):
            page = page.replace(old, new)
    # The policy allows a script by its hash, which a replacement inside the script has changed.
    after = [script for _, script, _ in _SCRIPT.findall(page)]
    for old, new in zip(before, after, strict=True):
        page = page.replace(_hash(old), _hash(new))
    return page
