"""One job at a time beside the program: a round's state is written while the next round trains.

Imports shield only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from emdcfl.experiments import shield


class Later:
    """Does one job after the other in a thread. What goes wrong in a job is raised by the next ``start`` or ``wait``.

    Examples
    --------
    >>> later, done = Later(), []
    >>> later.start(lambda: done.append("round 1"))
    >>> later.wait()
    >>> done
    ['round 1']
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job, once the one before it has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(job,), name="emdcfl-later")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being done any more; SIGTERM and Ctrl-C wait for that too."""
        with shield.unbroken():
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _work(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # whatever it is belongs to the thread that asked for the job
            self._error = error
