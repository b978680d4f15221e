"""Which sequences go into which micro-batch of which data-parallel rank.

Every rank runs equally many micro-batches, a multiple of what the pipeline schedule needs. The
sequences are spread so that this works out without empty micro-batches; those (fillers) are only
planned where there are fewer sequences than micro-batches. The plan never changes the gradient
(except under the reduction "token_mean_legacy", whose definition is the plan), only speed and
memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..errors import InputError, LayoutError

_PRINTED_RANKS = 16
_EVEN_ENOUGH = 1.01  # imbalance at which no second plan is tried

Bin = list[int]


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one mini-batch.

    Attributes:
        micro_batches: indexed [data-parallel rank][micro-batch]: the indices of its sequences,
            longest first; empty for a filler. Equally many micro-batches on every rank.
        lengths: [num_sequences], planned tokens of each sequence: its length rounded up to
            `pad_to`.
        packed: a micro-batch is one packed row, and costs the sum of its lengths; otherwise it is
            padded rows, and costs rows x the longest.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...]
    packed: bool

    @property
    def dp_size(self) -> int:
        return len(self.micro_batches)

    @property
    def num_microbatches(self) -> int:
        """Of each rank."""
        return len(self.micro_batches[0])

    @property
    def num_fillers(self) -> int:
        return sum(not micro_batch for rank in self.micro_batches for micro_batch in rank)

    @property
    def max_rows(self) -> int:
        """Most sequences in a micro-batch."""
        return max(len(micro_batch) for rank in self.micro_batches for micro_batch in rank)

    @property
    def max_tokens(self) -> int:
        """Planned tokens of the largest micro-batch, padding included."""
        return max(self.tokens(micro_batch) for rank in self.micro_batches for micro_batch in rank)

    @property
    def rank_tokens(self) -> list[int]:
        """Planned tokens of each rank, padding included."""
        return [sum(map(self.tokens, rank)) for rank in self.micro_batches]

    @property
    def imbalance(self) -> float:
        """Planned tokens of the rank with the most, over the mean."""
        tokens = self.rank_tokens
        return max(tokens) * len(tokens) / sum(tokens)

    @property
    def micro_batch_ids(self) -> list[int]:
        """The micro-batch of each sequence, numbered over all ranks; for `token_weights`."""
        ids = [0] * len(self.lengths)
        for rank, micro_batches in enumerate(self.micro_batches):
            for i, micro_batch in enumerate(micro_batches):
                for sequence in micro_batch:
                    ids[sequence] = rank * self.num_microbatches + i
        return ids

    def tokens(self, micro_batch: Sequence[int]) -> int:
        """Returns the planned tokens of one micro-batch, padding included."""
        return _tokens(micro_batch, self.lengths, self.packed)

    def __str__(self) -> str:
        tokens = self.rank_tokens
        kind = "packed" if self.packed else "padded"
        lines = [
            f"{len(self.lengths)} sequences, {sum(tokens):,} tokens ({kind}): {self.dp_size} ranks "
            f"x {self.num_microbatches} micro-batches, {self.num_fillers} fillers; tokens of a "
            f"rank: max / mean = {self.imbalance:.3f}",
            "rank  sequences  fillers       tokens  largest micro-batch",
        ]
        for rank, micro_batches in enumerate(self.micro_batches[:_PRINTED_RANKS]):
            sizes = [len(micro_batch) for micro_batch in micro_batches]
            largest = max(map(self.tokens, micro_batches))
            lines.append(
                f"{rank:4d}  {sum(sizes):9d}  {sizes.count(0):7d}  {tokens[rank]:11,d}  "
                f"{largest:19,d}"
            )
        if self.dp_size > _PRINTED_RANKS:
            lines.append(f" ... and {self.dp_size - _PRINTED_RANKS} more ranks")
        return "\n".join(lines)


def _tokens(members: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    if packed or not members:
        return sum(lengths[i] for i in members)
    return max(lengths[i] for i in members) * len(members)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens_per_microbatch: int | None = None,
    packed: bool = False,
    multiple: int = 1,
    pad_to: int = 1,
    allow_fillers: bool = True,
) -> Plan:
    """Plans a mini-batch; the same arguments give the same plan on every rank.

    The number of micro-batches is the smallest that the greedy filling below finds, rounded up to
    `dp_size` x `multiple`. Packed: worst-fit decreasing (each sequence, longest first, into the
    emptiest micro-batch). Padded: neighbours in length share a micro-batch, for little padding.
    The micro-batches, largest first, go to the rank with the fewest tokens; if that comes out
    uneven, the sequences are dealt first and each rank filled then, and the more even plan wins.
    Cost: O(n log n).

    Args:
        lengths: tokens of each sequence of the mini-batch, over all ranks.
        dp_size: data-parallel ranks without context parallelism.
        micro_batch_size: most sequences in a micro-batch.
        max_tokens_per_microbatch: most tokens in a micro-batch, padding included (rows x the
            longest if not packed), before a context-parallel split. Give this or
            `micro_batch_size`.
        packed: micro-batches are packed rows.
        multiple: the number of micro-batches of a rank must be a multiple of it (the pipeline
            size when virtual pipeline stages are used).
        pad_to: each length is rounded up to a multiple of it (`sequence_multiple`).
        allow_fillers: plan empty micro-batches where there are too few sequences, or raise.

    Raises:
        InputError: no sequence, or an empty one.
        LayoutError: a sequence alone exceeds the budget; a size is below 1; not exactly one of the
            two limits is given; fillers are needed and not allowed.

    >>> plan = plan_micro_batches([5, 3, 8, 2, 6], dp_size=2, micro_batch_size=2)
    >>> plan.micro_batches
    (((2,), (0,)), ((4,), (1, 3)))
    """
    _check_sizes(dp_size=dp_size, multiple=multiple, pad_to=pad_to)
    _check_limits(micro_batch_size, max_tokens_per_microbatch)
    planned = _planned_lengths(lengths, pad_to, max_tokens_per_microbatch)
    order = np.argsort(-planned, kind="stable").tolist()
    costs = planned.tolist()
    fill = _packed_bins if packed else _padded_bins
    max_rows = micro_batch_size or len(costs)
    bins = fill(order, costs, max_rows, max_tokens_per_microbatch, dp_size * multiple)
    missing = -len(bins) % (dp_size * multiple)
    if missing and not allow_fillers:
        raise LayoutError(
            f"{len(costs)} sequences cannot fill {len(bins) + missing} micro-batches (dp_size "
            f"{dp_size} x a multiple of {multiple} each). Use at least {len(bins) + missing} "
            "sequences or fewer ranks, or allow fillers."
        )
    bins += [[] for _ in range(missing)]
    loads = np.array([_tokens(members, costs, packed) for members in bins])
    plan = _make_plan(_deal_bins(bins, loads, dp_size), costs, packed)
    if missing or plan.imbalance <= _EVEN_ENOUGH:
        return plan
    ranks = _deal_sequences(
        order, costs, max_rows, max_tokens_per_microbatch, dp_size, plan.num_microbatches, fill
    )
    other = plan if ranks is None else _make_plan(ranks, costs, packed)
    return min(plan, other, key=lambda plan: max(plan.rank_tokens))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if int(size) != size or size < 1:
            raise LayoutError(f"{name} must be an integer of at least 1, got {size}.")


def _check_limits(micro_batch_size: int | None, max_tokens: int | None) -> None:
    if (micro_batch_size is None) == (max_tokens is None):
        raise LayoutError(
            f"give either micro_batch_size or max_tokens_per_microbatch, got {micro_batch_size} "
            f"and {max_tokens}."
        )
    if micro_batch_size is not None:
        _check_sizes(micro_batch_size=micro_batch_size)
    if max_tokens is not None:
        _check_sizes(max_tokens_per_microbatch=max_tokens)


def _planned_lengths(lengths: Sequence[int], pad_to: int, max_tokens: int | None) -> np.ndarray:
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given):
        raise InputError(
            f"a mini-batch needs at least one sequence, got lengths of shape {given.shape}. Skip "
            "the step, or gather more rollouts."
        )
    if given.dtype.kind not in "iu":
        raise InputError(f"lengths must be integers (tokens), got {given.dtype}.")
    if given.min() < 1:
        i = int(given.argmin())
        raise InputError(f"sequence {i} has length {given[i]}; every sequence needs a token.")
    planned = -(-given // pad_to) * pad_to
    if max_tokens is not None and planned.max() > max_tokens:
        i = int((planned > max_tokens).argmax())
        padding = f" ({planned[i]} after padding to {pad_to})" if planned[i] != given[i] else ""
        raise LayoutError(
            f"sequence {i} has {given[i]} tokens{padding}, more than max_tokens_per_microbatch "
            f"{max_tokens}. Raise the budget to at least {planned.max()}, or cut or drop the "
            f"{int((planned > max_tokens).sum())} sequence(s) that are too long."
        )
    return planned


def _packed_bins(
    order: list[int], costs: list[int], max_rows: int, max_tokens: int | None, unit: int
) -> list[Bin]:
    """Returns a multiple of `unit` bins, or (fewer sequences than that) one for each sequence."""
    total = sum(costs[i] for i in order)
    limit = max_tokens or total
    least = max(-(-len(order) // max_rows), -(-total // limit))
    bins = _worst_fit(order, costs, max_rows, limit, least)
    target = _rounded_up(len(bins), unit)
    if target >= len(order):
        return [[i] for i in order]
    if target > len(bins):
        spread = _worst_fit(order, costs, max_rows, limit, target)
        bins = spread if len(spread) == target else bins
    return _split_largest(bins, costs, target, packed=True)


def _worst_fit(
    order: list[int], costs: list[int], max_rows: int, limit: int, num_bins: int
) -> list[Bin]:
    """Puts each sequence into the emptiest bin; opens another one where it does not fit."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0, i) for i in range(num_bins)]  # bins with room for another sequence
    for sequence in order:
        cost = costs[sequence]
        if heap and heap[0][0] + cost <= limit:
            load, i = heapq.heappop(heap)
        else:
            load, i = 0, len(bins)
            bins.append([])
        bins[i].append(sequence)
        if len(bins[i]) < max_rows:
            heapq.heappush(heap, (load + cost, i))
    return bins


def _padded_bins(
    order: list[int], costs: list[int], max_rows: int, max_tokens: int | None, unit: int
) -> list[Bin]:
    """As `_packed_bins`, with bins of neighbours in length; a bin costs rows x the longest."""
    longest = costs[order[0]]
    limit = max_tokens or longest * max_rows
    target = _rounded_up(len(_runs(order, costs, max_rows, limit)), unit)
    if target >= len(order):
        return [[i] for i in order]
    low, high = longest, limit  # the smallest budget that `target` bins suffice for
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, costs, max_rows, middle)) <= target:
            high = middle
        else:
            low = middle + 1
    starts = [*_runs(order, costs, max_rows, low), len(order)]
    bins = [order[a:b] for a, b in pairwise(starts)]
    return _split_largest(bins, costs, target, packed=False)


def _runs(order: list[int], costs: list[int], max_rows: int, limit: int) -> list[int]:
    """Returns where each bin starts when `order` is cut greedily."""
    starts, i = [], 0
    while i < len(order):
        starts.append(i)
        i += min(max_rows, limit // costs[order[i]])
    return starts


def _split_largest(bins: list[Bin], costs: list[int], target: int, *, packed: bool) -> list[Bin]:
    """Splits the costliest bins in two until there are `target`; needs as many sequences."""

    def entry(members: Bin) -> tuple[int, int, Bin]:
        load = _tokens(members, costs, packed) if len(members) > 1 else 0  # one cannot be split
        return (-load, members[0], members)

    if len(bins) >= target:
        return bins
    heap = [entry(members) for members in bins]
    heapq.heapify(heap)
    while len(heap) < target:
        members = heapq.heappop(heap)[2]
        half = len(members) // 2
        parts = (members[::2], members[1::2]) if packed else (members[:half], members[half:])
        for part in parts:
            heapq.heappush(heap, entry(part))
    return [members for _, _, members in heap]


def _deal_bins(bins: list[Bin], loads: np.ndarray, dp_size: int) -> list[list[Bin]]:
    """Gives each rank equally many bins, the largest first to the rank with the fewest tokens."""
    order = np.argsort(-loads, kind="stable").tolist()
    shares = _share(order, loads.tolist(), dp_size, len(bins) // dp_size)
    return [[bins[i] for i in share] for share in shares]


def _deal_sequences(
    order: list[int],
    costs: list[int],
    max_rows: int,
    max_tokens: int | None,
    dp_size: int,
    num_bins: int,
    fill: Callable[..., list[Bin]],
) -> list[list[Bin]] | None:
    """Deals the sequences first and fills each rank's bins then: more even with few bins, but a
    rank may come out with too few sequences or need too many bins; then None."""
    shares = _share(order, costs, dp_size, num_bins * max_rows)
    ranks = [fill(share, costs, max_rows, max_tokens, num_bins) for share in shares if share]
    if len(ranks) < dp_size or any(len(bins) != num_bins for bins in ranks):
        return None
    return ranks


def _share(order: list[int], costs: list[int], num_shares: int, room: int) -> list[list[int]]:
    """Gives each item to the share that costs least so far, `room` items at most to each."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    heap = [(0, share) for share in range(num_shares)]
    for i in order:
        total, share = heapq.heappop(heap)
        shares[share].append(i)
        if len(shares[share]) < room:
            heapq.heappush(heap, (total + costs[i], share))
    return shares


def _make_plan(ranks: list[list[Bin]], costs: list[int], packed: bool) -> Plan:
    return Plan(
        tuple(
            tuple(tuple(b) for b in sorted(bins, key=lambda b: -_tokens(b, costs, packed)))
            for bins in ranks
        ),
        tuple(costs),
        packed,
    )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
