"""Plans read from a compiled module's text, and targets that are none."""

import pytest

import plan
from fastweights import planning, sharding, targets
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

    on_tpu = MODULE.replace('backend_config={"known_trip_count":{"n":"3"}}', "condition=%go_on")
    on_tpu += """
%go_on (x: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
"""
    assert planning.collectives(on_tpu) == found


@pytest.mark.parametrize(
    ("groups", "leaves"),
    [
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", False),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", True),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", True),
        ("replica_groups=[2,4]<=[8]", False),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", True),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", False),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", True),
        ("source_target_pairs={{0,1},{5,4}}", False),
        ("source_target_pairs={{3,4},{4,3}}", True),
        ("replica_groups={}", True),
    ],
)
def test_a_collective_leaves_its_host_or_not(groups, leaves):
    """Eight devices on two hosts."""
    line = f"  %y = bf16[4]{{0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add"
    found = planning.collectives(f"ENTRY %main (x: bf16[4]) -> bf16[4] {{\n{line}\n}}\n", 4)
    assert found.keys() == ({"all-reduce"} if leaves else set())


@pytest.mark.parametrize(
    ("kind", "groups", "share"),
    [
        ("all-gather", "[1,8]<=[8]", 4),
        ("all-gather", "[4,2]<=[2,4]T(1,0)", 1),
        ("reduce-scatter", "[2,4]<=[2,2,2]T(1,0,2)", 2),
        ("all-to-all", "[1,8]<=[8]", 1),
    ],
)
def test_members_on_one_host_share_what_comes_in(kind, groups, share):
    line = f"  %y = bf16[4]{{0}} {kind}(%x), replica_groups={groups}, dimensions={{0}}"
    found = planning.collectives(f"ENTRY %main (x: bf16[4]) -> bf16[4] {{\n{line}\n}}\n", 4)
    assert found == {kind: (8 / share, 1)}


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (targets.find, "v9:2x2", "names no known chip; the chips are v5e"),
        (targets.find, "v5p:2x2", "needs 3 size(s) behind the colon, as in v5p:2x4x4"),
        (targets.find, "h200:some", "needs 1 size(s) behind the colon, as in h200:2"),
        (targets.find, "h200:0x8", "needs 1 size(s) behind the colon, as in h200:2"),
        (targets.find, "h200:²", "needs 1 size(s) behind the colon, as in h200:2"),
        (plan.parse_mesh, "data=2,data=8", "--mesh 'data=2,data=8' names data twice"),
        (plan.parse_mesh, "data=²", "--mesh has 'data=²'; write it as"),
        (plan.parse_mesh, "rows=2", "--mesh has 'rows=2'; write it as"),
        (plan.parse_mesh, "", "--mesh has ''; write it as"),
    ],
)
def test_a_target_or_a_mesh_that_is_none(read, text, sentence):
    with pytest.raises(UserError) as error:
        read(text)
    assert sentence in str(error.value)


def test_axes_that_a_mesh_does_not_name_are_one():
    assert plan.parse_mesh("fsdp=4,data=-1") == sharding.MeshConfig(-1, 4, 1, 1)


@pytest.mark.parametrize(
    ("x", "text"), [(1402.3, "1,402"), (99.94, "99.9"), (0.00123, "0.00123"), (0.0, "0")]
)
def test_large_and_small_figures_can_be_read(x, text):
    assert plan.shown(x) == text
