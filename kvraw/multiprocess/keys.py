"""What a chunk is called: a rolling hash of all tokens up to its end, with model, rank, salt and layout.

Two workers that would store the same bytes get the same key, and nobody else does. Tokens and salts stay in the worker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvraw.checks import integer
from kvraw.errors import BoundsError, LayoutError
from kvraw.multiprocess.messages import HASH_BYTES, MOST_KEYS

__all__ = ["CacheKey", "EngineDrivenContextMetadata", "MemoryLayoutDesc"]

_ITEM = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "uint16": 2, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}  # fmt: skip
_MOST_SALT = 128


@dataclass(frozen=True, slots=True)
class MemoryLayoutDesc:
    """Shapes and types of a chunk's parts, one after another.

    Attributes
    ----------
    shapes : tuple of tuple of int
        Each part's.
    dtypes : tuple of str
        Each part's, by torch's names without "torch.".

    Raises
    ------
    LayoutError
        There is no part, a type is unknown, or a size is not positive.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        shapes = tuple(tuple(integer("shapes", n) for n in shape) for shape in self.shapes)
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "dtypes", tuple(str(one).replace("torch.", "") for one in self.dtypes))
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise LayoutError(f"shapes has {len(self.shapes)} parts, dtypes {len(self.dtypes)}: must be as many, not 0")
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype not in _ITEM:
                raise LayoutError(f"dtypes has {dtype!r}, must be one of {', '.join(_ITEM)}")
            if not shape or min(shape) <= 0:
                raise LayoutError(f"shapes has {shape}, must be positive sizes")

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk."""
        return sum(math.prod(s) * _ITEM[d] for s, d in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class EngineDrivenContextMetadata:
    """What a worker's chunks are.

    Attributes
    ----------
    layout_desc : MemoryLayoutDesc
        A chunk's shapes and types.
    block_size : int
        Tokens of a block of the paged cache.
    use_mla : bool
        Whether K and V are one row.
    chunk_tokens : int
        Tokens of a chunk, a multiple of `block_size`.

    Raises
    ------
    BoundsError
        The tokens of a chunk are no multiple of a block's.
    """

    layout_desc: MemoryLayoutDesc
    block_size: int
    use_mla: bool
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.chunk_tokens <= 0 or self.chunk_tokens % self.block_size:
            raise BoundsError(
                f"chunk_tokens is {self.chunk_tokens}, must be a positive multiple of block_size ({self.block_size})"
            )

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of the paged cache that a chunk holds."""
        return self.chunk_tokens // self.block_size


@dataclass(frozen=True)
class CacheKey:
    r"""Tokens `start` to `end` of a prompt, of one model and rank.

    Attributes
    ----------
    model_name : str
        The model.
    world_size, worker_id : int
        Of how many ranks the model consists, and which this is; None: every rank holds the same.
    token_ids : sequence of int
        The prompt from its very beginning.
    start, end : int
        Which of its tokens: `start` a multiple of a chunk's tokens; an incomplete chunk at `end` is left out.
    request_id : str
        Whose; not part of the content.
    cache_salt : str
        Keeps users apart: other salt, other objects. At most 128 characters, none of ``@``, ``/``, ``\`` and NUL.

    Raises
    ------
    BoundsError
        `start` and `end` do not lie within the tokens, the rank not within the world, or the salt is none.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: Sequence[int] = field(repr=False)
    start: int
    end: int
    request_id: str = field(default="", compare=False)
    cache_salt: str = ""
    _hashes: dict[Any, list[bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= len(self.token_ids):
            raise BoundsError(
                f"start is {self.start}, end {self.end}: must be in order within the {len(self.token_ids)} token_ids"
            )
        if self.world_size <= 0 or not (self.worker_id is None or 0 <= self.worker_id < self.world_size):
            raise BoundsError(f"worker_id is {self.worker_id}, must be in [0, world_size) ({self.world_size}), or None")
        if len(self.cache_salt) > _MOST_SALT or any(bad in self.cache_salt for bad in "@/\\\0"):
            raise BoundsError(
                f"cache_salt is {self.cache_salt!r}, must be at most {_MOST_SALT} characters, none of @, /, \\ and NUL"
            )

    def hashes(self, metadata: EngineDrivenContextMetadata) -> list[bytes]:
        """Keys of the whole chunks from `start` to `end`, computed once.

        Parameters
        ----------
        metadata : EngineDrivenContextMetadata
            What a chunk is; part of the content.

        Returns
        -------
        list of bytes
            32 bytes for each chunk.

        Raises
        ------
        BoundsError
            `start` is no multiple of a chunk's tokens, or there are too many chunks.
        """
        found = self._hashes.get(metadata)
        if found is None:
            found = self._hashes[metadata] = self._hash(metadata)
        return found

    def _hash(self, metadata: EngineDrivenContextMetadata) -> list[bytes]:
        step = metadata.chunk_tokens
        if self.start % step:
            raise BoundsError(f"start is {self.start}, must be a multiple of chunk_tokens ({step})")
        first, last = self.start // step, self.end // step
        if last - first > MOST_KEYS:
            raise BoundsError(f"the key has {last - first} chunks, must have at most {MOST_KEYS}")
        given = np.asarray(self.token_ids[: last * step])
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise BoundsError(f"token_ids is {given.dtype} of {given.ndim} dimensions, must be one of integers")
        tokens = np.ascontiguousarray(given, dtype="<i8")
        layout = metadata.layout_desc
        about = (
            "kvraw 1", self.model_name, self.world_size, self.worker_id, self.cache_salt, step, layout.shapes,
            layout.dtypes, metadata.use_mla,
        )  # fmt: skip
        rolling = hashlib.blake2b(msgspec.msgpack.encode(about), digest_size=HASH_BYTES).digest()
        made = []
        for at in range(last):
            data = tokens[at * step : (at + 1) * step].tobytes()
            rolling = hashlib.blake2b(rolling + data, digest_size=HASH_BYTES).digest()
            if at >= first:
                made.append(rolling)
        return made
