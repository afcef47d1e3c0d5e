r"""Text of strangers, in a line for people: control characters are shown, and not carried out.

Groups, clients and records have names and values that anybody may choose. In a log, a line feed would begin a line that
looks like any other. On a terminal, an escape sequence would clear the screen or set its title, and an override of the
direction of text would show another name than there is.
"""

from __future__ import annotations

import re
import reprlib

_CONTROLS = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: line feed, ESC, and the CSI of one character
    "\u2028\u2029"  # line and paragraph separator
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\ud800-\udfff"  # bytes of a file's name that are not UTF-8, as Python has them
    "]"
)


def visible(text: str) -> str:
    r"""The text on one line, with its control characters as Python writes them: `\n`, `\x1b`, `\u202e`.

    A backslash stays as it is: the result is to be looked at, and not to be read back.
    """
    return _CONTROLS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 300


def shown(value: object) -> str:
    """What anybody has handed in, cut short. Python writes no integer of more than 4,300 digits, and a class may have
    no words for its values.
    """
    try:
        return _REPR.repr(value)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (`__repr__` is anybody's, and raises anything)
        return f"a value of type {type(value).__name__}, which cannot be shown ({type(error).__name__})"
