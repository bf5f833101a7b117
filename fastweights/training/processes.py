"""The processes of one run: joining them, and ending them together."""

import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from fastweights.errors import UserError, check


def initialize(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: int
) -> None:
    """Connects to the other processes; must come before anything that touches a device.

    Args:
      coordinator: host:port of process 0; None asks the cluster (Slurm, GKE, Open MPI).
      num_processes: None asks the cluster.
      process_id: None asks the cluster.
      timeout: seconds to wait for the others.

    Raises:
      UserError: no cluster found, or the others did not come in time.
    """
    host, _, port = (coordinator or "cluster:0").rpartition(":")
    check(
        bool(host) and port.isdigit(),
        f"--coordinator is '{coordinator}'; write it as host:port, such as 10.0.0.1:1234.",
    )
    # JAX ends a process that waits in vain without raising; this line then says what it waited for.
    print(
        f"process {process_id} of {num_processes}: joining the others at {coordinator} "
        f"within {timeout} s",
        flush=True,
    )
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"--multihost: process {process_id} of {num_processes} did not reach coordinator "
            f"{coordinator} within {timeout} s ({reason}); check that all processes run, "
            "or give --coordinator, --num_processes and --process_id."
        ) from error
    print(
        f"process {jax.process_index()} of {jax.process_count()}: "
        f"{jax.local_device_count()} of {jax.device_count()} devices are here",
        flush=True,
    )


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
