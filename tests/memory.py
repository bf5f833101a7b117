"""What a compiled training step holds in memory."""

import re
from collections.abc import Callable

import jax
import numpy as np

LENGTHS = (2048, 8192)
WIDTH = 512


def assert_linear(compile_at: Callable[[int], jax.stages.Compiled]) -> int:
    """Temporary memory linear in T and below 40 float32 arrays [B, T, D], at B = 1 and D = 512.

    Args:
      compile_at: from T to the compiled step. Code quality changes no buffer, so `quick_jit` will
        do.

    Returns:
      Numbers in the largest single array at the longer T.
    """
    programs = [compile_at(length) for length in LENGTHS]
    small, large = (p.memory_analysis().temp_size_in_bytes for p in programs)
    assert large <= 4.4 * small
    assert large < 40 * LENGTHS[1] * WIDTH * 4
    shapes = re.findall(r"(?:f32|c64|pred|s32)\[([\d,]+)\]", programs[1].as_text())
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
