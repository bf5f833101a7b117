"""How the TPU compiler schedules the gated delta rule, as kernels and as XLA code.

    python scripts/tpu_schedule.py --target tpu7x:2x2x1 [--chunk 128] [--no-xla]

No TPU is asked: the compiler (extra `aot`) writes down the bundles, which are the instructions that
a core starts together, one a cycle. A kernel's bundles are those of a grid step's code, and each of
its loops is taken to turn once a chunk; waits for memory are not among them. Of an XLA program
the compiler's own estimate of cycles is summed over its operations, and so are the shares of its
units, which are those of each operation's code, by these cycles. The time predicted is the
larger of bundles over the clock and of the operands' and results' bytes over the memory's speed.
The clocks are what the data sheets' peaks come to with the matrix units that the compiler knows.
"""

import argparse
import glob
import os
import re
import sys
import tempfile

from fastweights import cli, flops, targets
from fastweights.errors import check

SHAPES = {  # B, T, H, G with K = V = 128, as in docs/kernels.md
    "S1": (8, 4096, 16, 16),
    "S2": (1, 32768, 16, 16),
    "S3": (1, 16384, 16, 32),
}
DIM = 128
CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VLOAD", "VSTORE")
SPILLS = ("VLOAD:FILL", "VSTORE:SPILL")


def read_schedule(folder: str, *names: str) -> tuple[int, dict[str, float], int]:
    """(bundles, share of each unit's slots that is used, spills and fills) of code written last.

    Args:
      names: patterns for the name of a kernel or of an operation; the first that fits counts.
    """

    def newest(pattern: str) -> str:
        found = (glob.glob(os.path.join(folder, f"{name}{pattern}.txt")) for name in names)
        with open(max(next(filter(None, found)), key=os.path.getmtime)) as file:
            return file.read()

    bundles = re.search(
        r"total scheduled bundles:\s+(\d+)", newest("schedule-analysis_final_bundles")
    )
    lines = newest("final_hlo-static-per-bundle-utilization").splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    slots = dict(zip(names, map(int, lines[2].split()), strict=True))
    rows = [[int(x) for x in line.split()] for line in lines[4:] if line.strip()]
    used = dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True))
    shares = {name: used[name] / (slots[name] * len(rows)) for name in UNITS}
    return int(bundles[1]), shares, sum(used[name] for name in SPILLS)


def main() -> int:
    parser = argparse.ArgumentParser(description="How the TPU compiler schedules the rule.")
    parser.add_argument("--target", default="tpu7x:2x2x1", help="chip and topology")
    parser.add_argument("--chunk", type=int, default=64, choices=(64, 128), help="tokens a chunk")
    parser.add_argument("--no-xla", dest="xla", action="store_false", help="the kernels alone")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = ".*(final_bundles|final_hlo|schedule-analysis).*"
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            f"--xla_jf_dump_llo_pass_label_regex={wanted}"
        )
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        return report(args, folder)


def report(args, folder: str) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fastweights import planning
    from fastweights.ops import chunked
    from fastweights.ops.mosaic_tpu import blocks, rule

    chip = args.target.partition(":")[0]
    check(chip in CLOCKS, f"--target is '{args.target}'; give one of {', '.join(CLOCKS)}.")
    device = targets.find(args.target).devices[0]
    clock, speed = CLOCKS[chip], flops.peak_bandwidth(device.device_kind)
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    cores = mesh.abstract_mesh.abstract_device.num_cores
    print(f"{device.device_kind}: {cores} core(s) at {clock / 1e9} GHz, {speed / 1e12} TB/s")

    def compiled(core, shape, gradient: bool) -> str:
        B, T, H, G = shape

        def of(*dims, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct(dims, dtype)

        gates = (of(B, T, G, dtype=jnp.float32),) * 2
        qk, v, state = of(B, T, H, DIM), of(B, T, G, DIM), of(B, G, DIM, DIM, dtype=jnp.float32)

        def call(*inputs):
            def forward(*inputs):
                return core(*inputs, None, scale=DIM**-0.5, chunk_size=args.chunk)

            if not gradient:
                return forward(*inputs)
            out, pull = jax.vjp(forward, *inputs)
            return out, pull(out)

        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jitted = jax.jit(call, in_shardings=everywhere, out_shardings=everywhere)
            return jitted.lower(qk, qk, v, *gates, state).compile().as_text()

    def kernels(text: str, shape, name: str) -> float:
        """Prints a line a kernel; the seconds of all."""
        B, T, _, G = shape
        total = 0.0
        for instruction in planning.instructions(text):
            kernel = re.search(r"(rule_(?:forward|backward))", instruction.line)
            if instruction.kind != "custom-call" or not kernel:
                continue
            bundles, shares, spills = read_schedule(folder, f"*{kernel[1]}*")
            room = blocks.room_for_heads(DIM, DIM, args.chunk, wide=False)
            heads = blocks.count_heads(shape[2], G, room)
            groups = B * G // heads
            chunks = groups * (T // args.chunk)
            operands = re.search(
                r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}", instruction.line
            )
            moved = sum(planning.sizes(instruction.shape + operands[1]))
            compute = bundles * chunks / clock / min(cores, groups)
            seconds = max(compute, moved / speed)
            vmem = re.search(r'"used_scoped_memory_configs":.*?"size":"(\d+)"', instruction.line)
            units = ", ".join(f"{unit} {100 * share:.0f}%" for unit, share in shares.items())
            print(
                f"{name} {kernel[1]}: {bundles} bundles a chunk of {heads} heads, "
                f"{bundles / (heads * args.chunk):.2f} a token and head; {units}; {spills} spills "
                f"and fills; {int(vmem[1]) / 2**20:.1f} MiB of VMEM; {1e3 * compute:.2f} ms of "
                f"bundles, {1e3 * moved / speed:.2f} ms of memory: {1e3 * seconds:.2f} ms",
                flush=True,
            )
            total += seconds
        return total

    def xla(text: str) -> str:
        cycles, spills, busy = 0, 0, dict.fromkeys(UNITS[:2], 0.0)
        for instruction in planning.instructions(text):
            estimate = re.search(r'%([\w.\-]+) = .*"estimated_cycles":"(\d+)"', instruction.line)
            if estimate:
                mine = int(estimate[2]) * instruction.times
                # Of operations with equal code, whose names differ in their number, one is written.
                names = [f"*[0-9]-{x}[-.]*" for x in (estimate[1], estimate[1].split(".")[0])]
                _, shares, lost = read_schedule(folder, *names)
                cycles, spills = cycles + mine, spills + lost
                busy = {unit: value + mine * shares[unit] for unit, value in busy.items()}
        units = ", ".join(f"{unit} {100 * value / cycles:.0f}%" for unit, value in busy.items())
        return (
            f"XLA {1e3 * cycles / clock:.2f} ms by the compiler's estimate; {units}; "
            f"{spills} spills and fills"
        )

    for name in args.shapes:
        for gradient in (False, True):
            what = "forward and backward" if gradient else "forward"
            seconds = kernels(compiled(rule.core, SHAPES[name], gradient), SHAPES[name], name)
            line = f"{name} {what}: kernels {1e3 * seconds:.2f} ms"
            if args.xla:
                text = compiled(chunked.core, SHAPES[name], gradient)
                line += f", {xla(text)}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
