"""Tool calls of the GLM family: a name, then keys and values between tokens of their own.

`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`
"""

from __future__ import annotations

import re
from enum import Enum, auto

from millpond.front.parsing.reader import CALL, END_CALL, CallSink
from millpond.front.parsing.values import NAME, ArgumentWriter

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
MARKERS = (KEY, END_KEY, VALUE, END_VALUE)
HEAD = re.compile(rf"\s{{0,8}}{NAME}\s{{0,8}}")
"""What stands before the first key, or the beginning of it."""


class _At(Enum):
    NAME = auto()
    BETWEEN = auto()  # pairs
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()
    CLOSING = auto()  # a call's end inside a value: its end, if the value does not go on


class GlmCall:
    """One call. Inside a value only the value's own end counts, all other markers are text."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._at = _At.NAME
        self._arguments: ArgumentWriter | None = None
        self._text = ""  # of the name, of a key, or held at a call's end inside a value
        self._gap = ""  # between a key and its value
        self.failed = self.ended = False
        self.spilled = ""

    @property
    def literal(self) -> str:
        """What was read and not emitted, as text."""
        return CALL + self._text

    def text(self, text: str) -> str:
        """Read text; all of it is the call's."""
        match self._at:
            case _At.NAME:
                self._text += text
                self.failed = HEAD.fullmatch(self._text) is None
            case _At.KEY:
                self._text += text
            case _At.VALUE:
                self._writer.value(text)
            case _At.CLOSING:
                self._text += text
                if not text.isspace():
                    self._go_on("")
            case _At.AFTER_KEY:
                self._gap += text
                if not self._gap.isspace():  # the value's beginning is missing
                    self._begin_value()
                    self._writer.value(self._gap)
            case _At.BETWEEN:
                self.spilled += text if self.spilled else text.lstrip()
        return ""

    def mark(self, marker: str) -> bool:
        """Read a marker; another call's beginning ends this one where it can."""
        match self._at:
            case _At.NAME:
                return self._mark_after_name(marker)
            case _At.BETWEEN:
                return self._mark_between(marker)
            case _At.KEY | _At.AFTER_KEY:
                return self._mark_after_key(marker)
            case _At.VALUE:
                if marker == END_VALUE:
                    self._end_value()
                elif marker == END_CALL:
                    self._at, self._text = _At.CLOSING, marker
                else:
                    self._writer.value(marker)
            case _At.CLOSING:
                if marker == CALL:
                    self._end_value()
                    self._end()
                    return False
                if marker == END_CALL:
                    self._writer.value(self._text)
                    self._text = marker
                elif marker == END_VALUE:
                    self._writer.value(self._text)
                    self._end_value()
                else:
                    self._go_on(marker)
        return True

    def finish(self, *, cut: bool) -> None:
        """The answer is over: close what the model forgot to, but not what was cut."""
        if self._at is _At.NAME:
            if cut or self._sink.tool(self._text.strip()) is None:
                self.failed = True
                return
            self._begin()
        if cut and self._at is not _At.CLOSING:
            return
        if self._at in (_At.VALUE, _At.CLOSING):
            self._end_value()
        elif self._at in (_At.KEY, _At.AFTER_KEY):
            self._spill_key()
        self._end()

    @property
    def _writer(self) -> ArgumentWriter:
        if self._arguments is None:
            raise RuntimeError("a call has arguments after its name")
        return self._arguments

    def _mark_after_name(self, marker: str) -> bool:
        if marker in (KEY, END_CALL) and self._text.strip():
            self._begin()
            return self._mark_between(marker)
        self.failed = True
        return False

    def _mark_between(self, marker: str) -> bool:
        if marker == KEY:
            self._at, self._text, self._gap = _At.KEY, "", ""
        elif marker in (CALL, END_CALL):
            self._end()
            return marker == END_CALL
        else:
            self.spilled += marker
        return True

    def _mark_after_key(self, marker: str) -> bool:
        if marker == VALUE:
            self._begin_value()
        elif marker in (CALL, END_CALL, KEY):
            self._spill_key()
            return self._mark_between(marker)
        elif marker == END_KEY:
            self._at = _At.AFTER_KEY
        else:
            self._text += marker
        return True

    def _begin(self) -> None:
        self._arguments = self._sink.begin(self._text.strip())
        self._at = _At.BETWEEN

    def _begin_value(self) -> None:
        self._writer.key(self._text)
        self._at = _At.VALUE

    def _end_value(self) -> None:
        self._writer.end_value()
        self._at = _At.BETWEEN

    def _go_on(self, marker: str) -> None:
        self._writer.value(self._text + marker)
        self._at = _At.VALUE

    def _spill_key(self) -> None:
        self.spilled += KEY + self._text
        self._at = _At.BETWEEN

    def _end(self) -> None:
        self._writer.close()
        self._sink.end()
        self.ended = True
