"""Generated text on a terminal, coloured by where each token came from. Independent of the engine.

    accepted tokens green │ the trunk's own token plain │ rejected tokens struck out
                                                        └ erased by the next step, which writes in their place

In a pipe the text is not coloured. Its last line ends like every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ACCEPTED, OWN, REJECTED, PROMPT = "green", "", "dim red strike", "dim"
TAB = 8
# A model's output must not control the terminal: control characters except newline and tab are replaced.
UNPRINTABLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
ONE_LINE = {9: "⇥", 10: "⏎"}


class Painter:
    """`console` writes to standard output. `keep` leaves rejected tokens in the text instead of erasing
    them."""

    def __init__(self, console: Console, keep: bool = False) -> None:
        self._console = console
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._keep = keep
        self._column = 0  # where the text ends, 0 … width-1
        self._rejected_width = 0  # cells of rejected tokens after it
        self._is_open = False  # the last line has text, and no newline

    def prompt(self, text: str) -> None:
        if self._live:
            self._write(text, PROMPT)

    def step(self, accepted: Sequence[str], bonus: str, rejected: Sequence[str]) -> None:
        """Writes one step's pieces of text."""
        self.erase()
        self._write("".join(accepted), ACCEPTED)
        self._write(bonus, OWN)
        if self._live:
            self._write_rejected("".join(rejected).translate(ONE_LINE).translate(UNPRINTABLE))

    def end(self) -> None:
        self.erase()
        if self._live or self._is_open:
            self._console.out("")

    def erase(self) -> None:
        """Erases the rejected tokens at the end."""
        if self._rejected_width:
            self._console.file.write(f"\x1b[{self._rejected_width}D\x1b[K")
            self._console.file.flush()
            self._rejected_width = 0

    def _write(self, text: str, style: str) -> None:
        if self._live:
            text = text.translate(UNPRINTABLE)
            self._column = advance(self._column, text, self._console.width)
        if text:
            self._is_open = not text.endswith("\n")
            self._console.out(text, style=style or None, end="", highlight=False)

    def _write_rejected(self, text: str) -> None:
        from rich.cells import cell_len, set_cell_size

        if self._keep:
            self._write(text, REJECTED)
            return
        # Only one line can be erased, so text that would wrap is cut; the last column stays free, because
        # terminals differ in wrapping.
        room = self._console.width - 1 - self._column
        shown = text if cell_len(text) <= room else set_cell_size(text, max(0, room))
        if shown:
            self._console.out(shown, style=REJECTED, end="", highlight=False)
            self._rejected_width = cell_len(shown)


def advance(column: int, text: str, width: int) -> int:
    """The cursor's column after `text`, in a terminal that wraps at `width`."""
    from rich.cells import cell_len

    for line in text.splitlines(keepends=True):
        for i, piece in enumerate(line.removesuffix("\n").split("\t")):
            if i > 0:
                column = min((column // TAB + 1) * TAB, width - 1)
            column = (column + cell_len(piece)) % width
        if line.endswith("\n"):
            column = 0
    return column
