"""A packed row's offsets, checked, and what is derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class PackedRow:
    """Where the sequences of a packed row are, as numbers on the host.

    Attributes:
        offsets: [N + 1], where each sequence starts, and the row's length; padding included.
        lengths: [N], tokens of each sequence without its padding.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def last_positions(self) -> list[int]:
        """Positions of the sequences' last tokens, which predict nothing."""
        return [start + n - 1 for start, n in zip(self.offsets, self.lengths, strict=False)]

    def position_ids(self, device: torch.device) -> Tensor:
        """Returns [1, T] int64, starting at 0 in each sequence."""
        parts = [torch.arange(end - start) for start, end in pairwise(self.offsets)]
        return torch.cat(parts)[None].to(device)


def packed_row(given: Mapping[str, Any], tokens: Tensor) -> PackedRow | None:
    """Returns the offsets of a packed micro-batch, or None if it is not packed.

    Args:
        given: may hold `cu_seqlens` [N + 1] (offsets without padding) and `cu_seqlens_padded`
            (where sequences start; by default the same).
        tokens: [1, T].

    Raises:
        InputError: offsets do not fit each other or the row.
    """
    if "cu_seqlens" not in given:
        if "cu_seqlens_padded" in given:
            raise InputError("micro-batch has 'cu_seqlens_padded' but no 'cu_seqlens'; pass both.")
        return None
    real = torch.as_tensor(given["cu_seqlens"])
    padded = torch.as_tensor(given.get("cu_seqlens_padded", real))
    if real.dim() != 1 or len(real) < 2 or real.shape != padded.shape:
        raise InputError(
            "cu_seqlens and cu_seqlens_padded must both be [N + 1] for N packed sequences, got "
            f"{tuple(real.shape)} and {tuple(padded.shape)}."
        )
    if tokens.shape[0] != 1 or int(padded[-1]) != tokens.shape[1]:
        raise InputError(
            f"packed offsets end at {int(padded[-1])}, but tokens are {tuple(tokens.shape)}; "
            "packed sequences are one row [1, T], all of it covered by cu_seqlens_padded."
        )
    lengths, room = real.diff().tolist(), padded.diff().tolist()
    if (
        int(real[0])
        or int(padded[0])
        or not all(1 <= n <= r for n, r in zip(lengths, room, strict=True))
    ):
        raise InputError(
            "packed offsets must start at 0, and each sequence needs a token and at most its "
            f"padded length; got lengths {lengths} in {room}."
        )
    return PackedRow(tuple(padded.tolist()), tuple(lengths))
