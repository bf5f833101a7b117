"""The processes of one run find each other, and make sure that they are of one run."""

import contextlib
import os
import re
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastweights import config as config_lib
from fastweights.errors import UserError, check

GREETING = "fastweights"  # begins every line of the roll call
GO, NO = f"{GREETING} go", f"{GREETING} no: "
PATIENCE = 5.0  # seconds that the other end has for a line
SHOWN = 8  # of the missing


def initialize(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: int,
    silence: int = 100,
) -> None:
    """Connects to the other processes; must come before anything that touches a device.

    Args:
      coordinator: host:port of process 0; None asks the cluster (Slurm, GKE, Open MPI).
      num_processes: None asks the cluster.
      process_id: None asks the cluster.
      timeout: seconds to wait for the others.
      silence: seconds after which a silent process counts as dead; see `processes.watch`.

    Raises:
      UserError: numbers that cannot be, no cluster found, the others did not come in time, or no
        device is left for this process.
    """
    _check_numbers(coordinator, num_processes, process_id, timeout, silence)
    deadline = time.monotonic() + timeout
    numbered = num_processes is not None and process_id is not None
    who = f"process {process_id} of {num_processes}" if numbered else "this process"
    print(
        f"{who}: joining the others at {coordinator or 'the cluster'} within {timeout} s",
        flush=True,
    )
    left = timeout
    if coordinator is not None and num_processes is not None and process_id is not None:
        # JAX ends a process that waits in vain with a stack of its own, and cannot say for whom.
        host, _, port = coordinator.rpartition(":")
        if process_id == 0:
            bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
            _call_the_roll(int(bound.rpartition(":")[2]), num_processes, deadline)
        else:
            _answer_the_roll(host.strip("[]"), int(port), num_processes, process_id, deadline)
        left = max(60, round(deadline - time.monotonic()))  # all are there
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=left,
            # Long after `watch`, which says which process it is, and ends all of them.
            heartbeat_timeout_seconds=4 * silence,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        where = f"the others at {coordinator}" if coordinator else "a cluster's other processes"
        raise UserError(
            f"--multihost: did not find {where} ({reason}); check that all processes run, or give "
            "--coordinator, --num_processes and --process_id."
        ) from error
    try:
        here = jax.local_device_count()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"--multihost: {who} has no device of its own ({reason}); start no more processes than "
            "there are devices."
        ) from error
    print(
        f"process {jax.process_index()} of {jax.process_count()}: "
        f"{here} of {jax.device_count()} devices are here",
        flush=True,
    )


def _check_numbers(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: int,
    silence: int,
) -> None:
    """Raises `UserError` for numbers that cannot be, before anyone waits."""
    check(silence >= 1, f"--silence is {silence}; give at least 1 second.")
    check(timeout >= 1, f"--init_timeout is {timeout}; give at least 1 second.")
    host, _, port = (coordinator or "cluster:1").rpartition(":")
    check(
        bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
        f"--coordinator is '{coordinator}'; write it as host:port, such as 10.0.0.1:1234.",
    )
    check(
        process_id is None or 0 <= process_id < (num_processes or process_id + 1),
        f"--process_id is {process_id} of --num_processes {num_processes}; number the processes "
        "from 0.",
    )


def _call_the_roll(port: int, count: int, deadline: float) -> None:
    """Process 0 waits for the others at the coordinator's port and tells them to go on.

    Raises:
      UserError: the port is taken, some did not come in time, or one was started with another
        number of processes or as one that is there already; those who came are told too.
    """
    came: dict[int, socket.socket] = {}
    greeted: list[socket.socket] = []  # also those that came twice
    mistake = ""
    with contextlib.ExitStack() as calls:
        with _listen(port) as listener:
            while not mistake:
                missing = [n for n in range(1, count) if n not in came or _hung_up(came[n])]
                if not missing:
                    break
                if time.monotonic() >= deadline:
                    some = ", ".join(map(str, missing[:SHOWN])) + ", ..." * (len(missing) > SHOWN)
                    mistake = (
                        f"process {some} of {count} did not come in time; start all of them, or "
                        "raise --init_timeout"
                    )
                elif heard := _hear(listener, deadline):
                    call, number, total = heard
                    greeted.append(calls.enter_context(call))
                    if total != count:
                        mistake = (
                            f"process {number} has --num_processes {total} and process 0 {count}; "
                            "give all the same"
                        )
                    elif number in came and not _hung_up(came[number]):
                        mistake = f"two processes have --process_id {number}; give each its own"
                    came[number] = call
        # Nobody listens any more: who is told to go on calls JAX at this port.
        for call in greeted:
            with contextlib.suppress(OSError):
                call.settimeout(PATIENCE)
                call.sendall(f"{f'{NO}{mistake}' if mistake else GO}\n".encode())
        for call in greeted:
            with contextlib.suppress(OSError):
                call.recv(1)  # it hangs up first, so that the port is free at once
    check(not mistake, f"--multihost: {mistake}.")


def _listen(port: int) -> socket.socket:
    """At every address of this machine, as JAX does.

    Raises:
      UserError: the port can't be had.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"--multihost: process 0 cannot listen at port {port} ({error.strerror}); give another "
            "--coordinator, or end what has the port (another process 0?)."
        ) from error


def _hear(listener: socket.socket, deadline: float) -> tuple[socket.socket, int, int] | None:
    """A caller with its number and count of processes; None for a stranger, or nobody in time."""
    listener.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        call = listener.accept()[0]
    except OSError:
        time.sleep(0.01)
        return None
    call.settimeout(PATIENCE)
    try:
        said = call.recv(64)
    except OSError:
        said = b""
    greeting = re.fullmatch(rf"{GREETING} (\d{{1,9}}) (\d{{1,9}})\n".encode(), said)
    if greeting is None:
        call.close()
        return None
    return call, int(greeting[1]), int(greeting[2])


def _hung_up(call: socket.socket) -> bool:
    call.setblocking(False)
    try:
        return call.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _answer_the_roll(host: str, port: int, count: int, me: int, deadline: float) -> None:
    """Another process greets process 0 until that tells it to go on.

    Raises:
      UserError: process 0 is not there until the deadline, or tells of a mistake.
    """
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((host, port), timeout=min(left, PATIENCE)) as call:
                call.sendall(f"{GREETING} {me} {count}\n".encode())
                call.settimeout(left + PATIENCE)  # so that process 0 can say who is missing
                said = call.makefile("rb").readline(1000).decode(errors="replace").strip()
            if said == GO:
                return
            check(not said.startswith(NO), f"--multihost: {said.removeprefix(NO)}.")
            # Such as JAX's own service of an earlier start.
            reason = "something else answers there" if said else "it hung up"
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
        if deadline - time.monotonic() <= 0.5:
            raise UserError(
                f"--multihost: no coordinator answers at {host}:{port} ({reason}); check that "
                "process 0 runs there, that its port can be reached and that all the others run, "
                "or raise --init_timeout."
            )
        time.sleep(0.5)


def agree(config: config_lib.Config) -> None:
    """Returns if all processes have this config.

    Another learning rate, say, would train replicas apart in silence, and another number of steps
    would wait for ever.

    Raises:
      UserError: one has another; the same in all of them.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(config_lib.to_json(config).encode(), np.uint8)
    sizes_P = multihost_utils.process_allgather(np.array(len(mine)))
    padded = np.zeros(max(sizes_P), np.uint8)
    padded[: len(mine)] = mine
    texts = [
        bytes(row[:size]).decode()
        for row, size in zip(multihost_utils.process_allgather(padded), sizes_P, strict=True)
    ]
    for index, text in enumerate(texts):
        found = config_lib.differences(config_lib.from_json(texts[0]), config_lib.from_json(text))
        for name, (first, other) in found.items():
            raise UserError(
                f"process {index} was started with {name}={other!r} and process 0 with {first!r}; "
                "start all with one config."
            )
