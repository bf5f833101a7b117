"""The processes of one run find each other, and make sure that they are of one run."""

import contextlib
import re
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastweights import config as config_lib
from fastweights.errors import UserError, check

GREETING, GO = "fastweights", "go"
PATIENCE = 5.0  # seconds that a caller has to say its greeting


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
    check(silence >= 1, f"--silence is {silence}; give at least 1 second.")
    check(timeout >= 1, f"--init_timeout is {timeout}; give at least 1 second.")
    deadline = time.monotonic() + timeout
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        check(
            bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
            f"--coordinator is '{coordinator}'; write it as host:port, such as 10.0.0.1:1234.",
        )
        check(
            num_processes is not None and process_id is not None,
            f"--coordinator {coordinator} says where process 0 is; give --num_processes and "
            "--process_id too.",
        )
        assert num_processes is not None and process_id is not None
        check(
            0 <= process_id < num_processes,
            f"--process_id is {process_id} of --num_processes {num_processes}; number the "
            "processes from 0.",
        )
        print(
            f"process {process_id} of {num_processes}: joining the others at {coordinator} "
            f"within {timeout} s",
            flush=True,
        )
        # JAX ends a process that waits in vain with a stack of its own, and cannot say for whom.
        if process_id == 0:
            _call_the_roll(int(port), num_processes, deadline)
        else:
            _answer_the_roll(host.strip("[]"), int(port), num_processes, process_id, deadline)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=max(1, round(deadline - time.monotonic())),
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
            f"--multihost: process {process_id} of {num_processes} has no device of its own "
            f"({reason}); start no more processes than there are devices."
        ) from error
    print(
        f"process {jax.process_index()} of {jax.process_count()}: "
        f"{here} of {jax.device_count()} devices are here",
        flush=True,
    )


def _call_the_roll(port: int, count: int, deadline: float) -> None:
    """Process 0 waits for the others at the coordinator's port and tells them to go on.

    Raises:
      UserError: the port is taken, some did not come in time, or one was started with another
        number of processes or as one that is there already; those who came are told too.
    """
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"--multihost: process 0 cannot listen at port {port} ({error.strerror}); end "
            "what does (another process 0?), or give another --coordinator."
        ) from error
    came: dict[int, socket.socket] = {}
    greeted: list[socket.socket] = []  # also those that came twice
    mistake = ""
    with listener, contextlib.ExitStack() as calls:
        while not mistake:
            came = {number: call for number, call in came.items() if not _hung_up(call)}
            if len(came) == count - 1:
                break
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                call = calls.enter_context(listener.accept()[0])
                call.settimeout(PATIENCE)
                said = call.makefile().readline()
            except TimeoutError:
                said = ""
            except (OSError, UnicodeDecodeError):  # whoever that was, it is none of the others
                continue
            if greeting := re.fullmatch(rf"{GREETING} (\d+) (\d+)\n", said):
                number, total = map(int, greeting.groups())
                if total != count:
                    mistake = (
                        f"process {number} has --num_processes {total} and process 0 {count}; give "
                        "all the same"
                    )
                elif number in came:
                    mistake = f"two processes have --process_id {number}; give each its own"
                came[number] = call
                greeted.append(call)
            elif time.monotonic() >= deadline:
                missing = ", ".join(str(n) for n in range(1, count) if n not in came)
                mistake = (
                    f"process {missing} of {count} did not come in time; start all of them, or "
                    "raise --init_timeout"
                )
        for call in greeted:
            with contextlib.suppress(OSError):
                call.settimeout(PATIENCE)
                call.sendall(f"{mistake or GO}\n".encode())
                call.recv(1)  # it hangs up first, so that the port is free at once
    check(not mistake, f"--multihost: {mistake}.")


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
      UserError: nobody listens there until the deadline, or process 0 tells of a mistake.
    """
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((host, port), timeout=left) as call:
                call.sendall(f"{GREETING} {me} {count}\n".encode())
                call.settimeout(left + PATIENCE)  # so that process 0 can say who is missing
                said = call.makefile().readline().strip()
            if said == GO:
                return
            check(not said, f"--multihost: {said}.")
            reason = "it hung up"
        except OSError as error:
            reason = error.strerror or error
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
        if text != texts[0]:
            found = config_lib.differences(
                config_lib.from_json(texts[0]), config_lib.from_json(text)
            )
            name, (first, other) = next(iter(found.items()))
            raise UserError(
                f"process {index} was started with {name}={other!r} and process 0 with {first!r}; "
                "start all with one config."
            )
