"""The look-up: which entry of a table serves a shape. A pure function, so that every rank and every process agrees.

Order of preference, each step only deciding where the one before left a tie:
1. where the entry comes from: measured on this device class, measured on another class of the same arch, static;
2. as many caches as the call has; then heads, topk, extra topk, tokens: made for this value, else for the nearest
   larger one, else for the nearest smaller one (larger first: a wide tile masks what is missing, while a narrow one
   gathers every key again);
3. page and extra page, the one that fits worse first: this size, any size, another size;
4. the lower tier: a family that a call must qualify for stands before the one that serves every call;
5. the narrower topk and token ranges, the device class's name, the place in the table.
An entry is exact when it was made for the shape in all of 2 and 3 (the page: this size or any); any other one serves
through the generic form of its kernel. The layout is never bent. Everything is compared as integers and strings: no
float, hash or dictionary order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .families import Family, is_gluon, known_family
from .table import Entry, Shape

Side = tuple[int, int]
_AXES = ("heads", "topk", "extra topk", "tokens")
_CACHES, _FIRST_AXIS = 1, 2
_WORST_PAGE = _FIRST_AXIS + len(_AXES)
_FIRST_PAGE = _WORST_PAGE + 1
_TIER = _FIRST_PAGE + 2
_ORIGINS = ("same class", "other class", "static")


@dataclass(frozen=True)
class Choice:
    """The entry that serves a shape, and how it was found.

    `exact`: the entry was made for the shape. `why`: one sentence. `fallback`: what serves instead of an exact entry of
    the same device class, or None when such an entry does.
    """

    entry: Entry
    exact: bool
    why: str
    fallback: str | None
    shape: Shape
    device_class: str | None
    entries: Sequence[Entry] = field(repr=False)
    exclude: Collection[Entry] = field(repr=False)

    @property
    def reasons_against(self) -> list[tuple[Entry, str]]:
        """Every other entry of the table, in its order, with the sentence that rules it out (made when asked for)."""
        return [
            (other, self._against(other)) for other in self.entries if other is not self.entry and other != self.entry
        ]

    @property
    def rivals(self) -> list[tuple[Entry, str]]:
        """As `reasons_against`, nearest first: what would serve in the order of the look-up, then what was left out, then what
        cannot serve the shape at all."""

        def place(pair: tuple[Entry, str]) -> tuple[object, ...]:
            other = pair[0]
            out = 2 if cannot_serve(other, self.shape) is not None else int(other in self.exclude)
            return (out, *_rank(other, self.shape, self.device_class))

        return sorted(self.reasons_against, key=place)

    def _against(self, other: Entry) -> str:
        if (mismatch := cannot_serve(other, self.shape)) is not None:
            return mismatch
        if other in self.exclude:
            return "It was left out: its module is not valid for the installed Triton, or the caller excluded it."
        return _worse(other, self.entry, self.shape, self.device_class)


def select(
    entries: Sequence[Entry], shape: Shape, device_class: str | None, *, exclude: Collection[Entry] = ()
) -> Choice | None:
    """The best entry for `shape` on `device_class` (None: a GPU that no class matches), or None when none can serve it.

    Entries in `exclude` are out. O(entries); `dispatch` keeps the result per shape.
    """
    best: tuple[tuple[object, ...], Entry] | None = None
    for place, entry in enumerate(entries):
        if cannot_serve(entry, shape) is not None or (exclude and entry in exclude):
            continue
        key = (*_rank(entry, shape, device_class), place)
        if best is None or key < best[0]:
            best = (key, entry)
    if best is None:
        return None
    entry = best[1]
    exact = is_exact(entry, shape)
    return Choice(
        entry=entry,
        exact=exact,
        why=_why(entry, shape, exact, device_class),
        fallback=_fallback(entry, shape, exact, device_class),
        shape=shape,
        device_class=device_class,
        entries=entries,
        exclude=exclude,
    )


def cannot_serve(entry: Entry, shape: Shape) -> str | None:
    """Why an entry cannot serve a shape in any form, or None."""
    if entry.layout != shape.layout:
        return f"It reads layout {entry.layout}, not {shape.layout}."
    if not shape.fp16 and entry.config.get("latent", "bf16") == "fp16":
        return "It keeps latents in fp16, for which the caller must state a scale_range inside [6e-5, 146]."
    if not shape.aligned and is_gluon(entry.module, entry.layout):
        return (
            "It copies rows 16 bytes at a time and needs a positive sm_scale; here a pointer or a stride is no multiple of "
            "16, or sm_scale is not positive."
        )
    family = known_family(entry.module, entry.layout)
    if family is not None and shape.heads < family.min_heads:
        return f"Its kernel gives every block of a cluster heads of its own: it needs {family.min_heads} heads, not {shape.heads}."
    if family is not None and too_large(family, entry, shape):
        most = f"{family.most_programs} blocks of heads and {family.most_keys} keys of a token"
        return f"Its kernel divides in fp32, which is exact for fewer than {most}."
    return None


def too_large(family: Family, entry: Entry, shape: Shape) -> bool:
    """Whether a call has more blocks of heads, or a token more keys, than a family's kernel can tell apart."""
    if family.most_programs is None or family.most_keys is None:
        return False
    programs = shape.tokens * -(-shape.heads // int(entry.config.get("block_h", 64)))
    return programs >= family.most_programs or shape.topk + shape.extra_topk >= family.most_keys


def is_exact(entry: Entry, shape: Shape) -> bool:
    """Whether the entry was made for this shape: every value is inside the entry's, and the page is equal or any."""
    if entry.layout != shape.layout or entry.dual != shape.dual:
        return False
    return all(part in ((0, 0), 0, 1) for part in _rank(entry, shape, None)[_FIRST_AXIS : _FIRST_PAGE + 2])


def missing(entries: Sequence[Entry], shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes that no entry was made for: what a model needs and a table lacks."""
    return [shape for shape in shapes if not any(is_exact(entry, shape) for entry in entries)]


def token_breaks(entries: Sequence[Entry], shape: Shape) -> list[int]:
    """First token count of each stretch up to `shape.tokens` in which the choice stays the same."""
    ends = {1}
    for entry in entries:
        if cannot_serve(entry, shape) is None:
            ends |= {entry.tokens[0], entry.tokens[1] + 1}
    return sorted(end for end in ends if 1 <= end <= shape.tokens)


def _rank(entry: Entry, shape: Shape, device_class: str | None) -> tuple[object, ...]:
    """Sort key: smaller is better. Its parts are those of the module's docstring, in that order."""
    page = _page(entry.page, shape.page)
    extra_page = _page(entry.extra_page, shape.extra_page) if entry.dual and shape.dual else 0
    return (
        _origin(entry, device_class),
        int(entry.dual != shape.dual),
        _side(shape.heads, entry.heads, entry.heads),
        _side(shape.topk, *entry.topk),
        _side(shape.extra_topk, *entry.extra_topk) if entry.dual and shape.dual else (0, 0),
        _side(max(shape.tokens, 1), *entry.tokens),
        max(page, extra_page),
        page,
        extra_page,
        entry.tier,
        entry.topk[1] - entry.topk[0],
        entry.extra_topk[1] - entry.extra_topk[0],
        entry.tokens[1] - entry.tokens[0],
        entry.provenance.device_class,
    )


def _origin(entry: Entry, device_class: str | None) -> int:
    provenance = entry.provenance
    if provenance.source == "static":
        return 2
    return 0 if provenance.device_class == device_class else 1


def _side(value: int, low: int, high: int) -> Side:
    """(0, 0) inside the range; (1, gap) for a range above the value; (2, gap) for one below it."""
    if value < low:
        return (1, low - value)
    return (2, value - high) if value > high else (0, 0)


def _page(made_for: int | None, page: int) -> int:
    return 1 if made_for is None else 0 if made_for == page else 2


def _caches(dual: bool) -> str:
    return "two caches" if dual else "one cache"


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} and more" if high >= 2**31 - 1 else f"{low} to {high}"


def _made_for(entry: Entry, axis: int) -> str:
    ranges = ((entry.heads, entry.heads), entry.topk, entry.extra_topk, entry.tokens)
    return f"{_span(*ranges[axis])} {_AXES[axis]}" if axis in (0, 3) else f"{_AXES[axis]} {_span(*ranges[axis])}"


def _wanted(shape: Shape, axis: int) -> int:
    return (shape.heads, shape.topk, shape.extra_topk, shape.tokens)[axis]


def _came_from(entry: Entry) -> str:
    provenance = entry.provenance
    if provenance.source == "static":
        return "ranked by the cost model and never timed"
    how = "measured" if provenance.source == "measured" else "inherited from a measured neighbour"
    return f"{how} on {provenance.device_class}"


def _why(entry: Entry, shape: Shape, exact: bool, device_class: str | None) -> str:
    origin = f"{_ORIGINS[_origin(entry, device_class)]}: {_came_from(entry)}"
    if exact:
        return f"Made for this shape ({origin})."
    return f"Nearest entry, served through the generic form of its kernel: {_differences(entry, shape)} ({origin})."


def _differences(entry: Entry, shape: Shape) -> str:
    rank = _rank(entry, shape, None)
    parts = [] if entry.dual == shape.dual else [f"made for {_caches(entry.dual)}, asked for {_caches(shape.dual)}"]
    parts += [
        f"made for {_made_for(entry, axis)}, asked for {_wanted(shape, axis)}"
        for axis in range(len(_AXES))
        if rank[_FIRST_AXIS + axis] != (0, 0)
    ]
    for name, made, asked, part in (
        ("page", entry.page, shape.page, rank[_FIRST_PAGE]),
        ("extra page", entry.extra_page, shape.extra_page, rank[_FIRST_PAGE + 1]),
    ):
        if part == 2:
            parts.append(f"made for {name} {made}, asked for {asked}")
    return "; ".join(parts)


def _fallback(entry: Entry, shape: Shape, exact: bool, device_class: str | None) -> str | None:
    """The text that is logged once. It leaves out the token count unless that is what differs."""
    origin = _origin(entry, device_class)
    parts = []
    if origin == 1:
        parts.append(
            f"no entry measured on {device_class or 'this GPU'} serves it, one of {entry.provenance.device_class} does"
        )
    elif origin == 2:
        parts.append("no measured entry serves it, a static one does (ranked by the cost model, never timed)")
    if not exact:
        parts.append(f"generic form, {_differences(entry, shape)}")
    return "; ".join(parts) or None


def _worse(other: Entry, winner: Entry, shape: Shape, device_class: str | None) -> str:
    """The first step of the order at which `other` loses to `winner`."""
    mine, best = _rank(other, shape, device_class), _rank(winner, shape, device_class)
    step = next((i for i, (a, b) in enumerate(zip(mine, best, strict=True)) if a != b), None)
    if step == 0:
        return f"It was {_came_from(other)}; the chosen one was {_came_from(winner)}."
    if step == _CACHES:
        return f"It was made for {_caches(other.dual)}; the call has {_caches(shape.dual)}."
    if step is not None and _FIRST_AXIS <= step < _WORST_PAGE:
        axis = step - _FIRST_AXIS
        return (
            f"It was made for {_made_for(other, axis)}; the chosen one, for {_made_for(winner, axis)}, "
            f"is nearer to {_wanted(shape, axis)}."
        )
    if step is not None and _WORST_PAGE <= step <= _FIRST_PAGE + 1:
        main = step == _FIRST_PAGE or (step == _WORST_PAGE and mine[_FIRST_PAGE] == mine[_WORST_PAGE])
        name, page = ("page", other.page) if main else ("extra page", other.extra_page)
        return f"It was made for {name} {page if page is not None else 'any'}; the chosen one fits better."
    if step == _TIER:
        return "It serves this shape as well; the chosen one was faster, or needs no promise about scales."
    if step is not None and step < len(mine) - 1:
        return "It serves this shape too, but was made for a wider range."
    return "It serves this shape as well; the chosen one comes first by device class or place in the table."
