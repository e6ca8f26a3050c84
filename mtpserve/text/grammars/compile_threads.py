"""Threads for what llguidance does with clients' grammars and schemas. They have a deadline, and a stack that
is large enough for the longest source that is accepted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mtpserve.core.errors import EngineBusy

# Compiling usually takes milliseconds; these bound what one request can make it cost.
COMPILE_SECONDS = 2.0
MAX_ABANDONED = 2  # threads that still compile after their deadline: nothing can stop them
STACK_BYTES = 512 << 20  # address space, not memory: enough for the deepest chain of an accepted source
STARTING = threading.Lock()  # the size of stacks is the whole process's


class CompileThreads:
    def __init__(self) -> None:
        self.abandoned: list[threading.Thread] = []

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` until the deadline; llguidance compiles without the GIL. Raises EngineBusy while
        threads of other requests do not end."""
        with STARTING:
            self.abandoned = [thread for thread in self.abandoned if thread.is_alive()]
            if len(self.abandoned) >= MAX_ABANDONED:
                raise EngineBusy("earlier grammars are still being compiled: try again later")
            before = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=work, name="grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join(COMPILE_SECONDS)
        if thread.is_alive():
            self.abandoned.append(thread)
