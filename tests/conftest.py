"""Settings for the whole suite; they must come before JAX touches its backend."""

import jax

# Eight simulated devices, so that sharded code runs as it would on eight accelerators.
jax.config.update("jax_num_cpu_devices", 8)
# Silent broadcasts of mismatched ranks hide shape bugs: every broadcast is spelt out.
jax.config.update("jax_numpy_rank_promotion", "raise")
