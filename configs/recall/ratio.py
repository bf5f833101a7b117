"""How much attention a hybrid needs: recall and loss against the share of attention layers.

    python scripts/reproduce.py ratio --workdir runs/ratio          (one GPU)

24 layers of Gated DeltaNet of which none, 2 (1:11), 3 (1:7), 6 (1:3), 12 (1:1) or all are
attention, the last of each group. Asked is what one attention layer alone does not answer, so that
there is a curve to see and no step: 1 to 4 hops along shuffled edges, each of which needs the last
one's answer. They are learnt one after the other, and on few nodes first: in a trial on 32 nodes
and 1 to 8 hops at once (commit 91023ac), three of the 3:1 hybrid's twelve runs had half of one hop
after 5,000 steps, and the others nothing. And the loss on text, which is to stay flat. Width 64,
equal parameters (by the MLP's width), three seeds; four rates, all of a model's as one program; on
text two rates, up to 3e-3, each run by itself. Attention has a short convolution as the other
layers do, and no positions.

Published (Wang et al. 2025, 1.3B parameters, mean over RULER): 0.26 without attention, 0.34 at
1:12, 0.39 at 1:6, 0.40 at 1:3, 0.42 with attention alone; language scores flat within a point. The
claims are the order of these, not the numbers. Not run to the end yet: after 2,000 steps on an H200
(commit fbb09a3) Gated DeltaNet alone recalled 0.67, the 3:1 hybrid 0.68, 1:1 0.72 and
attention alone 0.62, each at its best rate, so that memory is hardly what is short there.
"""

from ml_collections import ConfigDict

from fastweights.config import defaults, parse_arg
from fastweights.reproduction import ALL, Order
from fastweights.sweeps import SEEDS, learning_rates, matched
from fastweights.tasks.hops import QUERIES

PATTERNS = ("G", "GGGGGGGGGGGA", "GGGGGGGA", "GGGA", "GA", "A")
TASKS = ("k_hop", "text")
NODES, HOPS = (4, 8, 16), (1, 2, 3, 4)
TEXT = "256-511"
LEARNT = 0.4  # One hop alone, at every number of nodes, makes less than that of the mean.
WANG = "Wang et al. 2025, arXiv:2507.06457"
KIMI = "Kimi Linear 2025, arXiv:2510.26692"


def get_config(arg: str | None = None) -> ConfigDict:
    options = parse_arg(arg, task="k_hop", pattern="GGGA", layers=24)
    config = defaults()
    data, model = config.data, config.model
    data.kind = options.task
    if options.task == "text":
        # Runs on text do not train as one program, so they are shorter.
        config.steps, data.length, config.batch_size = 1000, 512, 32
        model.vocab_size = 257
        config.eval.during = config.eval.final = "ppl"
    else:
        config.steps, data.length, config.batch_size = 5000, 104, 128
        data.on_device, task = True, data.k_hop
        task.vocab_size = model.vocab_size = 64
        # A row holds two examples of the longest kind. More hops than half the ring are fewer back.
        parts = [(2 * n + 2 * min(n, QUERIES), n, h) for n in NODES for h in HOPS if h <= n // 2]
        task.train = tuple((*part, 1.0) for part in parts)
        task.test = tuple(parts)

    model.d_model, model.num_layers, model.pattern = 64, options.layers, options.pattern
    model.dtype, model.mlp, model.mlp_dim = "bfloat16", "swiglu", 128
    for letter in "AG":
        mixer = model.mixers[letter]
        mixer.num_heads, mixer.head_dim, mixer.conv_size = 2, 32, 4
    model.mixers.A.rope_fraction = 0.0

    config.optim.warmup_steps = 250
    config.log.every = 250
    config.eval.every = config.checkpoint.every = 500
    return config


def sweep():
    for task in TASKS:
        args = [{"arg": f"task={task},pattern={pattern}"} for pattern in PATTERNS]
        for point in matched(__file__, args, by="parameters", field="model.mlp_dim"):
            # Fewer rates for runs on text, too.
            for lr in learning_rates(3.2e-2) if task != "text" else learning_rates(3e-3, 2):
                for seed in SEEDS:
                    yield {**point, "optim.lr": lr, "seed": seed}


def claims():
    def order(better: str, worse: str, by: float, **more: float) -> Order:
        runs = (f"task=k_hop,pattern={pattern}" for pattern in (better, worse))
        return Order(*runs, slice=ALL, by=by, source=WANG, **more)

    # It rises ...
    yield order("GGGGGGGGGGGA", "G", 0.02)
    yield order("GGGGGGGA", "GGGGGGGGGGGA", -0.02, least=LEARNT)
    yield order("GGGA", "GGGGGGGGGGGA", 0.02)
    # ... and is flat from 1:3 on.
    for more in ("GA", "A"):
        yield order(more, "GGGA", -0.05, apart=0.05, least=LEARNT)
    for pattern in PATTERNS[1:]:
        runs = (f"task=text,pattern={name}" for name in (pattern, "G"))
        # One per cent of a loss of about 1.5 nats a byte, either way.
        yield Order(*runs, TEXT, -0.015, KIMI, eval="ppl", measure="nll", apart=0.015)
