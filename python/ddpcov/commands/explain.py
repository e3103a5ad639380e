"""`ddpcov explain`."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap

from ddpcov.diagnosis.codes import CODES, Code

__all__ = ["Explain"]

_WIDTH = 80
_KEYS = {key.lower(): code for code in CODES.values() for key in (code.code, code.slug)}


class Explain:
    """Say what a finding's code means, how it is established, what to do, and when it is harmless.

    CODE is a code or its slug, in upper or lower case: DDC105, output-not-in-loss. Without one, all codes are listed.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        parser.add_argument("codes", nargs="*", metavar="CODE")

    def run(self, args: argparse.Namespace) -> int:
        """Prints each code once, in the order asked for; if one is unknown, says so and prints nothing."""
        unknown = [word for word in args.codes if word.lower() not in _KEYS]
        if unknown:
            print(f"ddpcov explain: {'; '.join(_no_such_code(word) for word in unknown)}", file=sys.stderr)
            return 2
        if args.codes:
            asked = dict.fromkeys(_KEYS[word.lower()] for word in args.codes)
            text = "\n\n".join(_page(code) for code in asked)
        else:
            text = _list()
        print(text, flush=True)  # here, where `main` still sees that a pipe was closed
        return 0


def _no_such_code(word: str) -> str:
    close = difflib.get_close_matches(word.lower(), _KEYS, n=1)
    hint = f"did you mean {_named(_KEYS[close[0]])}?" if close else "without an argument, explain lists all codes"
    return f"no code {word!r}; {hint}"


def _named(code: Code) -> str:
    return f"{code.code} ({code.slug})"


def _page(code: Code) -> str:
    """All that is known of a code."""
    parts = (
        ("What it means", code.means),
        ("How it is established", code.established),
        ("What to do", code.fix),
        ("When it is harmless", code.harmless),
    )
    sections = [f"{title}\n{_wrapped(text, '  ', '  ')}" for title, text in parts]
    return "\n\n".join((f"{code.code} {code.slug}", *sections))


def _list() -> str:
    """A code, its slug and the first sentence of what it means, for each."""
    width = max(len(code.slug) for code in CODES.values())
    indent = " " * len(f"DDC100  {'':{width}}  ")
    entries = []
    for code in CODES.values():
        sentence = code.means.split(". ")[0].rstrip(".") + "."
        entries.append(_wrapped(sentence, f"{code.code}  {code.slug:{width}}  ", indent))
    return "\n".join(entries)


def _wrapped(text: str, first: str, indent: str) -> str:
    """The text in lines of at most `_WIDTH`, broken between words and never inside code, so that code can be copied."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")
