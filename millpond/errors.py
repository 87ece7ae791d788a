"""Every error millpond raises on purpose; knows nothing else of the package.

MillpondError
├── Refused        a configuration, model or device that cannot serve: raised at start
├── Rejected       one request that cannot be served as asked: HTTP 4xx, ValueError in Python
├── Unavailable    no capacity at present: the caller waits, queues or tries later
│   ├── Exhausted  a pool has nothing free and nothing evictable
│   └── Busy       as many requests are under way as may be: HTTP 429
├── StepFailed     one forward failed; its requests are recomputed or ended with an error
└── Broken         an invariant of ours does not hold: a bug in millpond
    └── LeaseError a lease was used after it was spent, twice, or beyond its right
"""

from __future__ import annotations


class MillpondError(Exception):
    """Base of all errors raised on purpose."""


class Refused(MillpondError):
    """The configuration, the model or the device cannot serve; the message says which and why."""


class Rejected(MillpondError, ValueError):
    """One request is refused. `param` names the offending field, `code` is a stable short name."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unavailable(MillpondError):
    """No capacity at present."""


class Exhausted(Unavailable):
    """A pool has nothing free."""


class Busy(Unavailable):
    """As many requests are under way as may be. `retry_after`: seconds after which to try again."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StepFailed(MillpondError):
    """A forward did not complete; nothing of it may be published."""


class Broken(MillpondError):
    """An invariant does not hold: a defect of millpond, never of the caller."""


class LeaseError(Broken):
    """A lease was used after it was spent, by somebody else, or beyond its right."""
