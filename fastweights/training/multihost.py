"""Joining the processes of one run."""

import jax

from fastweights.errors import UserError


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
