"""What a config needs on a target: does it fit, and how fast it can be at best.

    python scripts/plan.py --config configs/qwen3_5.py:size=0.8b --target v5p:2x2x1 \\
        [--mesh data=1,fsdp=4,tensor=1] [--search | --decode]

The training step, or with `--decode` a chunk of prefill and a step of decoding (`batch_size` rows
behind `data.length` tokens), is compiled for the target's devices, which need not be here (extra
`aot`). `--search` tries every data, fsdp and tensor mesh of its devices and the remat policies, and
lists those that fit, the least bound first. Memory is what the compiler reports. Bounds are lower
bounds: of the work that `flops.py` counts at the data sheet's peak, of touching once the memory
that a step must, and of what the collectives bring to a device over all its links (`h200:8x8` is
eight hosts of eight: what leaves one goes at an adapter's 50 GB/s a GPU). On GPUs attention is
planned in its XLA form, for cuDNN cannot be asked without a GPU.
"""

import argparse
import dataclasses
import itertools
import sys

from fastweights import cli, sharding, targets
from fastweights import config as config_lib
from fastweights.errors import UserError, check
from fastweights.model import REMAT_POLICIES
from fastweights.planning import Plan, plan_decode, plan_step

PREFILLED = 2048  # tokens of a chunk


def parse_mesh(text: str) -> sharding.MeshConfig:
    """`data=2,fsdp=4` as a mesh; axes not named are 1."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        check(
            axis in sharding.AXES and size.removeprefix("-").isdecimal(),
            f"--mesh has '{item}'; write it as data=2,fsdp=4 with the axes "
            f"{', '.join(sharding.AXES)}.",
        )
        check(axis not in sizes, f"--mesh '{text}' names {axis} twice; leave one out.")
        sizes[axis] = int(size)
    return sharding.MeshConfig(**dict.fromkeys(sharding.AXES, 1) | sizes)


def meshes(devices: int) -> list[sharding.MeshConfig]:
    """Every way to lay so many devices out with whole rows on each."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        sharding.MeshConfig(data, fsdp, devices // (data * fsdp))
        for data, fsdp in itertools.product(sizes, sizes)
        if devices % (data * fsdp) == 0
    ]


def shown(x: float) -> str:
    """Three digits or more, of which none is a nought in front."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def describe(plan: Plan, target: targets.Target, tokens: int) -> str:
    bound = max(plan.seconds, key=lambda kind: plan.seconds[kind])
    step = plan.seconds[bound]
    room = "fits in" if plan.fits(target) else "DOES NOT FIT in"
    lines = {
        "memory": f"{plan.total / 1e9:.4g} GB a device, {room} {target.chip.memory / 1e9:.0f} GB: "
        + ", ".join(f"{kind} {shown(size / 1e9)}" for kind, size in plan.bytes.items()),
        "work": f"{shown(plan.work / 1e12)} TFLOPs a device and step, "
        f"{shown(plan.work * len(target.devices) / tokens / 1e9)} GFLOPs a token",
        "network": ", ".join(
            f"{count} {kind} of {shown(size / 1e9)} GB"
            for kind, (size, count) in plan.collectives.items()
        )
        or "no collective",
        "at least": ", ".join(f"{kind} {shown(1e3 * s)} ms" for kind, s in plan.seconds.items())
        + f"; so at most {tokens / step:,.0f} tokens/s, bound by {bound}",
        "compile": f"{plan.compile_seconds:.0f} s",
    }
    return "\n".join(f"{name:>10}  {text}" for name, text in lines.items())


def search(config: config_lib.Config, target: targets.Target) -> int:
    """Prints a row for each mesh and remat policy; how many fit."""
    rows = []
    for mesh, remat in itertools.product(meshes(len(target.devices)), REMAT_POLICIES):
        tried = dataclasses.replace(
            config, mesh=mesh, model=dataclasses.replace(config.model, remat=remat)
        )
        name = f"{' '.join(f'{k}={v}' for k, v in dataclasses.asdict(mesh).items())} remat={remat}"
        try:
            plan = plan_step(tried, target)
        except UserError as error:
            print(f"{name:<44} {error}", flush=True)
            continue
        step = max(plan.seconds.values())
        room = "fits" if plan.fits(target) else "too large"
        print(
            f"{name:<44} {shown(plan.total / 1e9):>8} GB {shown(1e3 * step):>8} ms {room}",
            flush=True,
        )
        if plan.fits(target):
            rows.append((step, plan.total, name))
    print(f"{len(rows)} fit; the least bound first:")
    for step, total, name in sorted(rows)[:10]:
        print(f"  {name:<44} {shown(total / 1e9):>8} GB {shown(1e3 * step):>8} ms")
    return len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a config needs on a target.")
    parser.add_argument("--config", required=True, help="config file, path.py or path.py:arg")
    parser.add_argument("--target", required=True, help="chip and topology, such as v5p:2x2x1")
    parser.add_argument("--mesh", help="such as data=2,fsdp=4; the config's own by default")
    parser.add_argument("--decode", action="store_true", help="generation instead of training")
    parser.add_argument("--search", action="store_true", help="try every mesh and remat policy")
    args, overrides = cli.parse(parser, None)
    check(not (args.search and args.decode), "--search is of training; leave it or --decode out.")
    check(not (args.search and args.mesh), "--search tries every mesh; leave it or --mesh out.")
    config = config_lib.load(args.config, overrides)
    target = targets.find(args.target)
    if args.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(args.mesh))
    device = target.devices[0]
    rows = f"{len(target.devices)} x {device.device_kind}, {config.batch_size} x "
    mesh = " ".join(f"{axis} {n}" for axis, n in dataclasses.asdict(config.mesh).items())
    print(
        f"{rows}{config.data.length} tokens" + ("" if args.search else f", mesh {mesh}"), flush=True
    )
    if args.search:
        return 0 if search(config, target) else 1
    if args.decode:
        plans = plan_decode(config, target, PREFILLED)
    else:
        plans = {"training step": plan_step(config, target)}
    lengths = {"prefill": min(PREFILLED, config.data.length), "decode": 1}
    for name, plan in plans.items():
        tokens = config.batch_size * lengths.get(name, config.data.length)
        print(f"{name}, {tokens:,} tokens\n{describe(plan, target, tokens)}", flush=True)
    return 0 if all(plan.fits(target) for plan in plans.values()) else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
