"""A paged KV cache as kvraw sees it: base addresses, a layout, a place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, ValuesView
from typing import Any

from kvraw.addresses import in_reach, no_address
from kvraw.arrays import ASK_DRIVER, U64, pointer_vector, tensor_view
from kvraw.checks import NotPicklable, integer
from kvraw.errors import BoundsError, PlacementError
from kvraw.layouts.discovery import discover, flatten
from kvraw.layouts.formats import Format
from kvraw.layouts.geometry import CacheLayout, Geometry, find_format
from kvraw.runtime.context import device_if_active, generation, reset_error, resets
from kvraw.runtime.driver import driver_here
from kvraw.runtime.host.libc import mapped
from kvraw.runtime.memory import Over, held_by, locate

__all__ = ["PagedCache", "views_of"]

_MOST_PLANS = 128


def views_of(tensors: Any, name: str = "tensors") -> Any:
    """What discovery takes of tensors: of one, or of lists and dicts of them, as lists."""
    if isinstance(tensors, Mapping):
        return [views_of(t, f"{name}[{key!r}]") for key, t in tensors.items()]
    if isinstance(tensors, (list, tuple, ValuesView)):
        return [views_of(t, f"{name}[{at}]") for at, t in enumerate(tensors)]
    return tensor_view(tensors, name)


class PagedCache(NotPicklable):
    """A paged KV cache. It borrows the memory, and keeps tensors that it was made from alive.

    Make one with `from_tensors` or `from_pointers`, which look where memory lies; the constructor takes it on trust.

    Parameters
    ----------
    layout : CacheLayout
        Format and geometry.
    bases : sequence of int
        Base addresses in the format's order.
    device : int or None
        The device that holds the cache; None for host memory.
    owner : object, optional
        Kept alive with the cache.
    readonly : bool
        It must not be written.

    Attributes
    ----------
    layout : CacheLayout
        Format and geometry.
    bases : numpy.ndarray of uint64
        Base addresses in the format's order.
    device : int or None
        The device that holds the cache; None for host memory.
    readonly : bool
        A tensor says that it must not be written: the cache can be stored from, not loaded into.
    plans : dict
        Transfer plans that were made for the cache, used again by later calls; some hundred at most.

    Raises
    ------
    BoundsError
        There are too few or too many addresses, or one is null.

    Examples
    --------
    >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16) for _ in range(3)]
    >>> kvraw.PagedCache.from_tensors(layers, axes="PBTHD").geometry.blocks
    8
    """

    def __init__(
        self, layout: CacheLayout, bases: Any, device: int | None, owner: object = None, readonly: bool = False
    ) -> None:
        self.layout = layout
        self.bases = pointer_vector("pointers", bases).copy()  # plans take it as unchanged
        self.bases.flags.writeable = False
        self.device, self.readonly = device, readonly
        self.generation = 0 if device is None else generation(device)  # of the device's context
        self._owner = owner
        self.plans: dict[tuple[object, ...], Any] = {}
        if len(self.bases) != layout.pointers:
            raise BoundsError(
                f"pointers has {len(self.bases)} addresses, format {layout.format.name} with {self.geometry.layers} "
                f"layers takes {layout.pointers}"
            )
        if (self.bases == 0).any():
            raise BoundsError(f"pointers[{int((self.bases == 0).argmax())}] is null")

    @property
    def geometry(self) -> Geometry:
        """Counts of the cache."""
        return self.layout.geometry

    @classmethod
    def from_tensors(
        cls,
        tensors: Any,
        *,
        axes: str | None = None,
        format: int | str | Format | None = None,
        engine: str = "vllm",
        kv_layout: str | None = None,
        block_size: int | None = None,
        num_heads: int | None = None,
        head_size: int | None = None,
        kv_list_layout: str | None = None,
        planes: int | None = None,
    ) -> PagedCache:
        """From the engine's tensors, as it hands them over: one, a list, a list of lists, or vLLM's dict of layers.

        Parameters
        ----------
        tensors : object
            Tensors of any library on one device.
        axes : str, optional
            The axes of a tensor as it is shaped, such as ``"PBTHD"``: nothing is inferred then, and strides may be
            any as long as the elements of a head are dense; see `kvraw.layouts.discovery.discover`.
        format, engine, kv_layout, block_size, num_heads, head_size, kv_list_layout, planes
            Hints, see `kvraw.layouts.discovery.discover`; needed only where the tensors leave a choice.

        Returns
        -------
        PagedCache
            The cache; it keeps the tensors alive.

        Raises
        ------
        LayoutError
            The tensors fit no format or several; says which hint would settle it.
        BoundsError
            A tensor stands twice: layers that share one are handed over once.
        PlacementError
            They lie on different devices.
        TypeError
            Something is no tensor, or its memory is not what it says.

        Examples
        --------
        >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16) for _ in range(3)]
        >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")  # planes, blocks, tokens, heads, elements
        >>> cache.geometry.layers, cache.geometry.block_size, cache.chunk_bytes(tokens=1)
        (3, 16, 3072)

        Two axes that could be exchanged are an error, not a guess:

        >>> kvraw.PagedCache.from_tensors([np.zeros((2, 64, 8, 8, 128), np.int16)])
        Traceback (most recent call last):
        kvraw.errors.LayoutError: ...
        """
        views = views_of(tensors)
        found = discover(
            views,
            axes=axes,
            format=format,
            engine=engine,
            kv_layout=kv_layout,
            block_size=block_size,
            num_heads=num_heads,
            head_size=head_size,
            kv_list_layout=kv_list_layout,
            planes=planes,
        )
        _require_distinct("tensors", found.layout, found.addresses)
        devices: list[int | None] = []
        flat: list[Any] = [*flatten(views)[1].values()]
        for view in flat:
            devices.append(locate(view.address, 1).device if view.device == ASK_DRIVER else view.device)
        if len(set(devices)) != 1:
            raise PlacementError(f"tensors lie on different devices: {sorted(set(map(str, devices)))}")
        # Not the container that was handed over: the caller may change it.
        owners = tuple(v.owner for v in flat)
        return cls(found.layout, found.addresses, devices[0], owners, any(v.readonly for v in flat))

    @classmethod
    def from_pointers(
        cls,
        pointers: Sequence[int] | Any,
        format: int | str | Format,
        geometry: Geometry,
        *,
        device: int | None = None,
        owner: object = None,
    ) -> PagedCache:
        """From addresses.

        Parameters
        ----------
        pointers : sequence of int
            Base addresses in the format's order (`kvraw.layouts.formats`).
        format : int or str
            The layout.
        geometry : Geometry
            The counts; they are trusted.
        device : int, optional
            The device that holds the memory; None: host memory. The driver is asked, once, where it is there.
        owner : object, optional
            Kept alive with the cache.

        Returns
        -------
        PagedCache
            The cache; what lies at the addresses is the caller's to keep, or `owner`'s.

        Raises
        ------
        LayoutError
            Format and geometry do not fit.
        BoundsError
            There are too few or too many addresses, one is null or stands twice, or its memory ends before the last
            block does.
        PlacementError
            The driver knows an address as other memory than that of `device`, or there is no such device.

        Examples
        --------
        >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16) for _ in range(3)]
        >>> geometry = kvraw.Geometry(layers=3, blocks=8, block_size=16, heads=4, head_size=64, element_size=2)
        >>> kvraw.PagedCache.from_pointers([t.ctypes.data for t in layers], "NL_X_TWO_NB_BS_NH_HS", geometry)
        PagedCache(NL_X_TWO_NB_BS_NH_HS: 3 layers, K and V apart, 8 blocks of 16 tokens, ...
        """
        if device is not None:
            device = integer("device", device)
        cache = cls(CacheLayout(find_format(format), geometry), pointers, device, owner)
        _require_distinct("pointers", cache.layout, cache.bases.tolist())
        if device is None:
            nbytes = cache.layout.tensor_bytes()
            require_host("pointers", cache.bases, nbytes)
            for at, address in enumerate(cache.bases.tolist()):
                if not mapped(address, nbytes):
                    raise BoundsError(
                        f"pointers[{at}] is {address:#x}: this process has no {nbytes} bytes of memory there, which "
                        f"{geometry} takes"
                    )
        else:
            require_on_device("pointers", cache.bases, cache.layout.tensor_bytes(), device)
        return cache

    def keep_plan(self, key: tuple[object, ...], plan: object) -> None:
        """Keep a plan in `plans`; where they are many, the oldest half goes: chunks may come in any length."""
        if len(self.plans) >= _MOST_PLANS:
            for old in list(self.plans)[: _MOST_PLANS // 2]:
                self.plans.pop(old, None)  # another thread may do the same
        self.plans[key] = plan

    def without_plans(self) -> PagedCache:
        """The same cache for a plan that is kept in `plans`, which then is no cycle: what is dropped ends at once."""
        made = PagedCache(self.layout, self.bases, self.device, self._owner, self.readonly)
        made.generation = self.generation
        return made

    def require_writable(self) -> None:
        """Raise `PlacementError` where it is read-only memory.

        Raises
        ------
        PlacementError
            It is.
        """
        if self.readonly:
            raise PlacementError("cache holds a read-only tensor, must be writable for a load")

    def require_context(self) -> None:
        """Raise `ClosedError` where the context of its device was found to be reset since it was made."""
        if self.device is not None and resets(self.device) != self.generation:
            raise reset_error(self.device, "the cache")

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of this many tokens: all layers, all planes.

        Parameters
        ----------
        tokens : int
            Tokens of the chunk.

        Returns
        -------
        int
            Its bytes.

        Raises
        ------
        BoundsError
            `tokens` is not positive, or too large.
        """
        tokens, most = integer("tokens", tokens), ((1 << 63) - 1) // self.geometry.token_bytes
        if not 0 < tokens <= most:
            raise BoundsError(f"tokens is {tokens}, must be in [1, {most}]")
        return tokens * self.geometry.token_bytes

    def __repr__(self) -> str:
        where = "host" if self.device is None else f"cuda:{self.device}"
        return f"PagedCache({self.layout}, on {where})"


def _require_distinct(name: str, layout: CacheLayout, addresses: Sequence[int]) -> None:
    if len(set(addresses)) == len(addresses) or not layout.geometry.blocks:
        return
    for at, address in enumerate(addresses):
        first = addresses.index(address)
        if first != at:
            raise BoundsError(
                f"{name}: addresses {first} and {at} are both {address:#x}; each must be memory of its own"
            )


def require_host(name: str, addresses: Any, nbytes: int, first: int = 0) -> None:
    """Raise `BoundsError` where no process has such a range, `PlacementError` where a device holds its beginning.

    `first` is the number of the first of them.
    """
    for at, address in enumerate(map(int, addresses), first):
        if not in_reach(address, nbytes):
            raise no_address(f"{name}[{at}]", address, nbytes)
        device = held_by(address)
        if device is not None:
            raise PlacementError(
                f"{name}[{at}] is {address:#x}, memory of device {device}; the CPU engine takes host memory"
            )


def require_on_device(name: str, addresses: U64, nbytes: int, device: int) -> None:
    """Raise where the driver does not know every range as memory of a device; without a driver, nothing is known.

    Raises
    ------
    PlacementError
        There is no such device, or one is pageable or pinned host memory, or another device's.
    BoundsError
        One goes over the end of its memory.
    """
    d = driver_here()
    if d is None:
        return
    count = d.device_count()
    if not 0 <= device < count:
        raise PlacementError(f"device is {device}, must be in [0, {count})")
    if not nbytes:
        return
    with device_if_active(device):  # so that what every device may touch counts as this one's
        found = [locate(address, nbytes) for address in addresses.tolist()]
    for at, (address, where) in enumerate(zip(addresses.tolist(), found, strict=True)):
        if where.device is None:
            kind = "pinned" if where.device_address else "pageable"
            raise PlacementError(f"{name}[{at}] is {address:#x}, {kind} host memory, must be memory of device {device}")
        if where.device != device:
            raise PlacementError(f"{name}: {address:#x} is memory of device {where.device}, must be of device {device}")
        if where.over:
            raise Over(at, address, nbytes, where.over, device).error(f"{name}[{at}]")
