"""Settings for the whole suite; they must come before JAX is imported."""

import os
import pathlib

import pytest

CACHE = pathlib.Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax"

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    # Silent broadcasts of mismatched ranks hide shape bugs: every broadcast is spelt out.
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Equal programs are compiled once, for this process and those that tests start.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
    # Most programs here run once on tiny arrays: compiling is what they cost, and LLVM's optimiser
    # is a third of it.
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0",
}

import jax  # noqa: E402 - it reads the environment when imported

# Eight simulated devices, so that sharded code runs as it would on eight accelerators.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Compiled programs keep memory mappings, of which Linux gives a process 65,530.

    Beyond, the compiler ends the process with a segmentation fault; the simulated kernels alone
    leave ten thousand behind.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()
