"""The processes of one run: watching them, and ending them together."""

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from fastweights.errors import UserError
from fastweights.files import write_atomic

ENDED = "ended: "


@contextlib.contextmanager
def watch(workdir: pathlib.Path, silence: float) -> Iterator[None]:
    """Inside the block, the end of another process ends this one, with a sentence that names it.

    Without it a collective would wait for the dead for ever, or fail without saying for whom. Each
    process writes a sign of life into a file of its own in `workdir`/alive and reads the others';
    no clock is compared.

    Args:
      workdir: the run's folder, which all processes see.
      silence: seconds without a sign of life after which a process counts as dead.
    """
    if jax.process_count() == 1:
        yield
        return
    me, count = jax.process_index(), jax.process_count()
    paths = [workdir / "alive" / f"process-{i}" for i in range(count)]
    paths[me].parent.mkdir(parents=True, exist_ok=True)
    others = {i: _Other(paths[i]) for i in range(count) if i != me}
    over, pause = threading.Event(), min(1.0, silence / 10)

    def write(text: str) -> bool:
        try:
            write_atomic(paths[me], text)
        except OSError:  # a full disk is for the checkpoints to tell
            return False
        return True

    def live() -> None:
        before = time.monotonic()
        while not over.wait(pause):
            written = write(str(time.time_ns()))
            before, turn = time.monotonic(), time.monotonic() - before
            for i, other in others.items():
                if not written or turn > 5 * pause:
                    other.excuse()  # the disk that they write to too is at fault
                cause = other.cause_of_death(silence)
                # One that says why it ends has company: the same mistake ends this process too.
                if cause and not over.wait(2 * pause if cause.startswith(ENDED) else 0):
                    _leave(
                        f"error: process {i} of {count} {cause}, which ends process {me}; start "
                        "all again to go on from the last checkpoint.",
                        code=1,
                        linger=4 * pause,
                    )

    write(str(time.time_ns()))
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    with _slow_abort(others[0], silence + 5 * pause) if me else contextlib.nullcontext():
        try:
            yield
        except BaseException as error:
            mistake = isinstance(error, UserError)
            # Of a collective without its other end; orbax wraps it in an error of its own.
            below = error.__cause__ if mistake else error
            lost = isinstance(below, jax.errors.JaxRuntimeError) or (mistake and below is not None)
            if lost and not isinstance(below, OSError) and "RESOURCE_EXHAUSTED" not in str(below):
                # The thread will say whose.
                thread.join(silence + 5 * pause)
            over.set()
            thread.join(5 * pause)  # its last sign of life must not come after this
            write(f"{ENDED}{error if mistake else repr(error)}".split("\n")[0])
            if not isinstance(error, Exception):
                raise
            said = f"error: {error}" if mistake else traceback.format_exc()
            _leave(said, code=2 if mistake else 1, linger=4 * pause)
    over.set()
    thread.join(5 * pause)
    paths[me].unlink(missing_ok=True)


@contextlib.contextmanager
def _slow_abort(coordinator: "_Other", patience: float) -> Iterator[None]:
    """Inside the block abort() waits until it is known whether process 0 lives.

    JAX's client aborts the moment that process 0's coordination service is gone, and speaks of a
    leader. The thread that aborts is one of JAX's own and has no way back, but while it waits here
    `watch` finds process 0 silent, says so and ends all. Any other abort goes on once process 0 has
    shown that it lives.
    """
    handle = ctypes.CDLL(None).signal
    handle.argtypes, handle.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def wait(number):
        coordinator.await_life(patience)
        handle(number, before)
        os.kill(os.getpid(), number)

    # Python's own `signal` would only take a note, for a main thread that may wait in a collective.
    before = handle(signal.SIGABRT, ctypes.cast(wait, ctypes.c_void_p))
    try:
        yield
    finally:
        handle(signal.SIGABRT, before)


class _Other:
    """What is known of another process from its file, which is gone once all has gone well."""

    def __init__(self, path: pathlib.Path):
        self._path, self._heard, self._began = path, time.monotonic(), False
        self._signs = 0
        self._text = self._read()  # of an earlier start, perhaps

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return ""

    def excuse(self) -> None:
        """Its silence so far does not count."""
        self._heard = time.monotonic()

    def await_life(self, patience: float) -> None:
        """Returns when another thread has read two more signs of life, or after so many seconds.

        One would not do: it may be from before the call.
        """
        enough, deadline = self._signs + 2, time.monotonic() + patience
        while self._signs < enough and time.monotonic() < deadline:
            time.sleep(0.1)

    def cause_of_death(self, silence: float) -> str:
        """Why it counts as dead; empty while it lives, or has finished."""
        text = self._read()
        if text != self._text:
            self._text, self._heard, self._began = text, time.monotonic(), True
            self._signs += 1
        if self._began and not text:
            return ""
        if self._began and text.startswith(ENDED):
            return text
        quiet = time.monotonic() - self._heard
        return f"has given no sign of life for {quiet:.0f} s" if quiet > silence else ""


def _leave(message: str, code: int, linger: float) -> None:
    """Ends the process at once: to leave as usual would be to wait for the others.

    Only process 0 stays for `linger` seconds, or the others would name it and not the dead one.
    """
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    if jax.process_index() == 0:
        time.sleep(linger)
    os._exit(code)


def stop_on_sigterm() -> Callable[[int], bool]:
    """A question to ask before each step: has SIGTERM come? Takes the number of finished steps.

    With several processes it becomes true at the same step in all of them, whichever got the
    signal, so that they save together.
    """
    if jax.process_count() > 1:
        # jax.distributed listens for SIGTERM itself and agrees on a step.
        return multihost_utils.reached_preemption_sync_point
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return lambda _: stop.is_set()
