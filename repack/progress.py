"""`Progress`: what a long run tells whoever watches it."""

from typing import Protocol


class Progress(Protocol):
    """Follows a run by the bytes that it writes (`repack`, `unpack`) or reads (`verify`).

    `start` comes once, before the first byte; the `done_bytes` of all `advance` calls add up to its total. An
    exception raised here stops the run like any other fault: what is finished stays, and a later run resumes.
    """

    def start(self, total_bytes: int) -> None:
        """The run has `total_bytes` before it."""

    def advance(self, done_bytes: int, what: str) -> None:
        """Another `done_bytes` are done, of the file or layer called `what`."""


class NoProgress:
    """`Progress` that nobody watches."""

    def start(self, total_bytes: int) -> None:
        """Nothing is shown."""

    def advance(self, done_bytes: int, what: str) -> None:
        """Nothing is shown."""
