"""Reader: the thread that waits for an executor, so that the engine's thread can be woken."""

from __future__ import annotations

import logging
import threading
from collections import deque

from trtpd.errors import EngineError, TrtpdError
from trtpd.runtime.engine.tensorrt_llm.backend import Answer, Backend, Iteration

log = logging.getLogger(__name__)

AWAIT_S = 0.02
"""How long the executor is asked to wait for answers; then its statistics are looked at."""


class Reader:
    """Puts the executor's answers and statistics into one queue and sets `woken`.

    Statistics are read before answers, so that they come no later than what followed them.
    """

    def __init__(self, backend: Backend) -> None:
        self.woken = threading.Event()
        self._backend = backend
        self._found: deque[Answer | Iteration] = deque()
        self._failure: EngineError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[Answer | Iteration]:
        """What has come. Raises EngineError when the executor can't go on, once all before that was taken."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        if not found and self._failure is not None:
            raise self._failure
        return found

    def stop(self) -> None:
        """Returns when the thread has let go of the executor."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                found: list[Answer | Iteration] = [*self._backend.iterations()]
                found += self._backend.answers(AWAIT_S)
                if found:
                    self._found.extend(found)
                    self.woken.set()
        except TrtpdError as error:
            log.error("%s", error)
            self._failure = EngineError(str(error))
            self.woken.set()
