"""Plans read from a compiled module's text, and targets that are none."""

import pytest

from fastweights import planning, targets
from fastweights.errors import UserError

MODULE = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%layer (x: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %gathered = bf16[16,8]{1,0} all-gather(%part), dimensions={0}
  %reduced = f32[8]{0} all-reduce(%gathered), to_apply=%add
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %started = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %done = bf16[16,8]{1,0} all-gather-done(%started)
  %loop = (s32[]) while(%t), body=%layer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_collectives_of_a_loop_count_as_often_as_it_turns():
    found = planning.collectives(MODULE)
    assert found == {
        "all-gather": ((1 + 3) * 16 * 8 * 2, 4),
        "all-reduce": (3 * 8 * 4, 3),
    }


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("v9:2x2", "names no known chip; the chips are v5e"),
        ("v5p:2x2", "needs 3 size(s) behind the colon, as in v5p:2x4x4"),
        ("h200:some", "needs 1 size(s) behind the colon, as in h200:2"),
        ("h200:0x8", "needs 1 size(s) behind the colon, as in h200:2"),
    ],
)
def test_a_target_that_is_none(name, sentence):
    with pytest.raises(UserError) as error:
        targets.find(name)
    assert sentence in str(error.value)
