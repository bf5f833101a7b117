"""k-hop recall: follow a ring of nodes that is only given as shuffled edges.

    n3 n1 | n1 n2 | n2 n3 |  (2) n3  (1) n1  . .        targets n2 at n3, n2 at n1

Each edge names a node and its successor, each query a number of hops and a node; the answer is the
node that many successors on. One hop is associative recall, each further one must use the answer
of the last, which takes depth rather than capacity (after "Depo" of Allen-Zhu 2025, Physics of
Language Models 4.1).

Array legend: N examples, T tokens, E nodes (and edges), Q queries.
"""

import dataclasses
from typing import ClassVar

from fastweights.errors import check
from fastweights.tasks.base import Slice, TaskConfig
from fastweights.tasks.draws import Array, Draws, interleave

QUERIES = 10


@dataclasses.dataclass(frozen=True)
class KHopConfig(TaskConfig):
    """Entries are (length, nodes, hops). Tokens: 0 filler, 1.. the hops, then names of nodes.

    Attributes:
      vocab_size: of all these.
      max_hops: hops that have a token.
    """

    NAME: ClassVar[str] = "k_hop"
    ENTRY: ClassVar[tuple[str, ...]] = ("length", "nodes", "hops")

    vocab_size: int = 64
    max_hops: int = 8
    train: tuple[tuple[int, int, int, float], ...] = tuple((64, 16, h, 1.0) for h in (1, 2, 4))
    test: tuple[tuple[int, int, int], ...] = tuple((64, 16, h) for h in (1, 2, 4, 8))

    def check_entry(self, field: str, length: int, nodes: int, hops: int) -> None:
        where = f"{self.NAME}.{field} has {nodes} nodes and {hops} hops in {length} tokens"
        check(
            1 <= hops <= self.max_hops and hops < nodes,
            f"{where}; hops must be at least 1, at most max_hops {self.max_hops}, and fewer than "
            "the nodes.",
        )
        needed = 2 * nodes + 2 * min(QUERIES, nodes)
        check(length >= needed, f"{where}; edges and queries take at least {needed} tokens.")
        names = self.vocab_size - 1 - self.max_hops
        check(
            names >= nodes,
            f"{where} but {self.NAME}.vocab_size {self.vocab_size} leaves only {names} names; "
            "raise it.",
        )

    def part(self, length: int, nodes: int, hops: int) -> Slice:
        # The node that is asked from is never the answer.
        return Slice(length, nodes, choices=nodes - 1, marks=(("H", hops),))

    def answers(self, part: Slice) -> int:
        return min(QUERIES, part.pairs)

    def examples(self, draws: Draws, count: int, part: Slice) -> tuple[Array, Array]:
        xp, nodes, hops = draws.xp, part.pairs, part.marks[0][1]
        first = 1 + self.max_hops
        ring_NE = first + draws.distinct(count, self.vocab_size - first, nodes)
        edge_NE = draws.distinct(count, nodes, nodes)
        edges_NT = interleave(
            draws,
            xp.take_along_axis(ring_NE, edge_NE, axis=1),
            xp.take_along_axis(ring_NE, (edge_NE + 1) % nodes, axis=1),
        )
        from_NQ = draws.distinct(count, nodes, min(QUERIES, nodes))
        asked_NQ = xp.take_along_axis(ring_NE, from_NQ, axis=1)
        answers_NQ = xp.take_along_axis(ring_NE, (from_NQ + hops) % nodes, axis=1)
        queries_NT = interleave(draws, xp.full_like(asked_NQ, hops), asked_NQ)
        wanted_NT = interleave(draws, xp.full_like(answers_NQ, -1), answers_NQ)
        rest = part.length - edges_NT.shape[1] - queries_NT.shape[1]
        tokens_NT = xp.concatenate([edges_NT, queries_NT], axis=1)
        around = ((0, 0), (edges_NT.shape[1], rest))
        return (
            xp.pad(tokens_NT, ((0, 0), (0, rest))),
            xp.pad(wanted_NT, around, constant_values=-1),
        )
