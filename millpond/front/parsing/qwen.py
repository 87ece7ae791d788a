"""Tool calls of the Qwen 3.5 family: tags of plain text between two tokens.

`<tool_call>\\n<function=NAME>\\n<parameter=K>\\nV\\n</parameter>\\n</function>\\n</tool_call>`
"""

from __future__ import annotations

import re
from enum import Enum, auto

from millpond.front.parsing.reader import CALL, END_CALL, CallSink
from millpond.front.parsing.values import NAME, ArgumentWriter, Tool

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY = re.compile(r"[^<>\n]{0,256}")
OPENINGS = 8  # white space that may stand before a call's function


class _At(Enum):
    HEAD = auto()  # before the function's name is whole
    BODY = auto()  # between parameters
    VALUE = auto()
    CLOSING = auto()  # a call's end inside a value: its end, if the value does not go on
    TAIL = auto()  # after the function


class QwenCall:
    """One call. A value ends at `</parameter>`; where that is missing, at the next thing that fits.

    One line break on either side of a value is of the format.
    """

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._at = _At.HEAD
        self._arguments: ArgumentWriter | None = None
        self._tool: Tool | None = None
        self._seen: set[str] = set()  # keys
        self._text = ""  # not decided yet
        self._first = False  # nothing of the value has been read
        self.failed = self.ended = False
        self.spilled = ""

    @property
    def literal(self) -> str:
        """What was read and not emitted, as text."""
        return (self.spilled if self._arguments else CALL) + self._text

    def text(self, text: str) -> str:
        """Read text; what follows a function and is no further one is not the call's."""
        self._text += text
        while True:
            before = self._at, self._text
            match self._at:
                case _At.HEAD:
                    self._read_head()
                case _At.BODY:
                    self._read_body()
                case _At.VALUE:
                    self._read_value()
                case _At.CLOSING:
                    if not self._text.removeprefix(END_CALL).isspace():
                        self._write(self._take(len(END_CALL)))
                        self._at = _At.VALUE
                case _At.TAIL:
                    if rest := self._read_tail():
                        return rest
            if self.failed or (self._at, self._text) == before:
                return ""

    def mark(self, marker: str) -> bool:
        """Read a marker; another call's beginning ends this one where it can."""
        match self._at:
            case _At.HEAD:
                self.failed = True
                return False
            case _At.TAIL:
                self._spill(self._take().rstrip())
                self.ended = True
                return marker == END_CALL
            case _At.BODY:
                self._spill(self._take().rstrip())
                if marker not in (CALL, END_CALL):
                    self._spill(marker)
                    return True
                self._end()
                self.ended = True
                return marker == END_CALL
            case _At.VALUE if marker in (CALL, END_CALL) and self._after_function():
                self._end_value()
                self._end()
                self.ended = True
                return marker == END_CALL
            case _At.VALUE if marker == END_CALL:
                self._write(self._take())
                self._at, self._text = _At.CLOSING, marker
            case _At.CLOSING if marker == CALL:
                self._end_value()
                self._end()
                self.ended = True
                return False
            case _:
                self._write(self._take())
                if marker == END_CALL:
                    self._text = marker
                else:
                    self._write(marker)
                    self._at = _At.VALUE
        return True

    def finish(self, *, cut: bool) -> None:
        """The answer is over: close what the model forgot to, but not what was cut."""
        if self._at is _At.HEAD:
            self.failed = True
            return
        if self._at is _At.TAIL:
            self._spill(self._take().rstrip())
            self.ended = True
            return
        if cut and self._at is not _At.CLOSING:
            return
        if self._at is _At.BODY:
            self._spill(self._take().rstrip())
        else:
            if self._at is _At.VALUE and not self._after_function():
                self._write(self._take())
            self._end_value()
        self._end()
        self.ended = True

    @property
    def _writer(self) -> ArgumentWriter:
        if self._arguments is None:
            raise RuntimeError("a call has arguments after its name")
        return self._arguments

    def _take(self, count: int | None = None) -> str:
        count = len(self._text) if count is None else count
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _read_head(self) -> None:
        bare = self._text.lstrip()
        if not bare.startswith(FUNCTION):
            self.failed = not FUNCTION.startswith(bare) or len(self._text) - len(bare) > OPENINGS
            return
        name, closed, rest = bare.removeprefix(FUNCTION).partition(">")
        if closed and name and re.fullmatch(NAME, name):
            self._tool = self._sink.tool(name)
            self._arguments, self._text = self._sink.begin(name), rest
            self._at = _At.BODY
        else:
            self.failed = bool(closed) or re.fullmatch(NAME, name) is None

    def _read_body(self) -> None:
        bare = self._text.lstrip()
        if bare.startswith(END_FUNCTION):
            self._text = bare.removeprefix(END_FUNCTION)
            self._end()
            self._at = _At.TAIL
        elif bare.startswith(PARAMETER):
            key, closed, rest = bare.removeprefix(PARAMETER).partition(">")
            if closed and KEY.fullmatch(key):
                self._text, self._first, self._at = rest, True, _At.VALUE
                self._seen.add(key)
                self._writer.key(key)
            elif closed or KEY.fullmatch(key) is None:
                self._spill(self._take(len(self._text) - len(bare) + 1))
        elif bare and not (END_FUNCTION.startswith(bare) or PARAMETER.startswith(bare)):
            odd = re.match(r".[^<]*", bare, re.DOTALL)
            length = len(odd.group().rstrip()) if odd else 0
            self._spill(self._take(len(self._text) - len(bare) + length))

    def _read_value(self) -> None:
        if self._first and self._text:
            self._text, self._first = self._text.removeprefix("\n"), False
        for at, char in enumerate(self._text):
            if char not in "\n<":
                continue
            rest = self._text[at:]
            bare = rest.removeprefix("\n")
            if bare.startswith(END_PARAMETER):
                self._write(self._take(at))
                self._text = bare.removeprefix(END_PARAMETER)
                self._end_value()
                return
            keys = self._missing() if char == "\n" else ()
            if any(bare.startswith(key) for key in keys):  # and its own end was forgotten
                self._write(self._take(at))
                self._end_value()
                return
            if any(tag.startswith(bare) for tag in (END_PARAMETER, END_FUNCTION, *keys)) or (
                bare.startswith(END_FUNCTION) and not bare.removeprefix(END_FUNCTION).strip()
            ):
                self._write(self._take(at))
                return
        self._write(self._take())

    def _after_function(self) -> bool:
        """Whether a value is followed by the end of the function, its own end forgotten."""
        return self._text.removeprefix("\n").startswith(END_FUNCTION)

    def _missing(self) -> tuple[str, ...]:
        """The openings of parameters that the tool has and the call does not, so far."""
        keys = self._tool.kinds if self._tool else ()
        return tuple(f"{PARAMETER}{k}>" for k in keys if k not in self._seen)

    def _read_tail(self) -> str:
        bare = self._text.lstrip()
        if bare.startswith(FUNCTION):  # another function without a call of its own
            self._text, self._at = bare, _At.HEAD
            self._seen.clear()
        elif bare and not FUNCTION.startswith(bare):
            self.ended = True
            return self._take()
        return ""

    def _write(self, text: str) -> None:
        if text:
            self._first = False
            self._writer.value(text)

    def _end_value(self) -> None:
        self._writer.end_value()
        self._at = _At.BODY

    def _spill(self, text: str) -> None:
        self.spilled += text if self.spilled else text.lstrip()

    def _end(self) -> None:
        self._writer.close()
        self._sink.end()
