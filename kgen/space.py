"""Search spaces: named axes, and restrictions that each say in a sentence why a point is out.

A space is walked axis by axis. A restriction is checked as soon as the axes that it reads (directly or through
definitions) have values, so that one refusal removes a whole block of the grid; the block's size goes to that
restriction's count, and the counts and the feasible points sum to the size of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from kgen.archs import ArchSpec, DeviceClass
from kgen.config import Node, config_root, find_yaml, read_yaml, suggestion, yaml_files
from kgen.errors import ConfigError
from kgen.expressions import Expression, parse_expression
from kgen.runtime.families import FAMILIES
from kgen.types import Candidate, KernelSpec, LaunchOptions, Scalar

KINDS = ("tunable", "launch")
LAUNCH_NAMES = tuple(field.name for field in fields(LaunchOptions))

SPEC_NAMES = (
    *("arch", "phase", "layout", "d_qk", "heads", "heads_pow2", "topk", "extra_topk", "keys", "page", "extra_page"),
    *("tokens", "dual", "fp8", "scale", "group"),
)
ARCH_NAMES = (
    "cc",
    "smem",
    "smem_per_sm",
    "regs_per_sm",
    "max_regs",
    "max_warps",
    "mma",
    "tma",
    "clusters",
    "tmem",
    "sms",
)
FEASIBLE = "feasible"


@dataclass(frozen=True)
class Axis:
    """One dimension of a space. `ordinal`: the values are ordered, so that a sampler may step to a neighbour."""

    name: str
    values: tuple[Scalar, ...]
    ordinal: bool
    kind: str  # "tunable" (a constant of the template) or "launch" (a compiler option)


@dataclass(frozen=True)
class Restriction:
    """A condition that every usable point meets, and the sentence that a point is refused with."""

    name: str
    expression: Expression
    sentence: str


@dataclass(frozen=True)
class SearchSpace:
    """The space of one kernel family. `definitions` name expressions, in order: each may read those before it."""

    family: str
    axes: tuple[Axis, ...]
    definitions: tuple[tuple[str, Expression], ...]
    restrictions: tuple[Restriction, ...]

    @property
    def size(self) -> int:
        """Points of the whole grid."""
        return math.prod(len(axis.values) for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """The axis of that name, or a sentence with the nearest one."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = [axis.name for axis in self.axes]
        raise ConfigError(
            f"The space {self.family} has no axis {name!r}{suggestion(name, names)}; axes: {', '.join(names)}."
        )

    def points(self) -> Iterator[Candidate]:
        """Every point of the grid, restrictions aside."""
        yield from self._walk(None)

    def feasible(self, spec: KernelSpec, arch: ArchSpec, device: DeviceClass | None = None) -> Iterator[Candidate]:
        """The points that no restriction refuses, in grid order; without a device class, for the one with most SMs."""
        yield from self._walk(_Checks(self, environment(spec, arch, device)))

    def explain(self, spec: KernelSpec, arch: ArchSpec, device: DeviceClass | None = None) -> dict[str, int]:
        """How many points each restriction takes (the first to refuse has it), and `feasible`; they sum to `size`."""
        checks = _Checks(self, environment(spec, arch, device))
        feasible = sum(1 for _ in self._walk_values(checks))
        return {**checks.counts, FEASIBLE: feasible}

    def refusals(
        self, candidate: Candidate, spec: KernelSpec, arch: ArchSpec, device: DeviceClass | None = None
    ) -> list[str]:
        """A sentence per restriction that refuses the candidate; empty when it is feasible."""
        env = {**environment(spec, arch, device), **self.values(candidate)}
        for name, expression in self.definitions:
            env[name] = expression(env)
        return [r.sentence for r in self.restrictions if not _holds(r, env)]

    def candidate(self, tunables: Mapping[str, Scalar], launch: Mapping[str, Scalar]) -> Candidate:
        """A checked candidate of this space: each axis once, in the group of its kind, with one of its values."""
        for group, kind in ((tunables, "tunable"), (launch, "launch")):
            for name, value in group.items():
                axis = self.axis(name)
                if axis.kind != kind:
                    right = "a launch option" if axis.kind == "launch" else "a tunable of the template"
                    raise ConfigError(f"{name!r} is {right}, not a {kind}: the two are never mixed.")
                _check_value(axis, value)
        for axis in self.axes:
            if axis.name not in (tunables if axis.kind == "tunable" else launch):
                raise ConfigError(f"A candidate of {self.family} needs a value of {axis.name!r}.")
        return _candidate(self.family, tunables, launch)

    def values(self, candidate: Candidate) -> dict[str, Scalar]:
        """The axis values of a candidate, which must be of this space."""
        if candidate.family != self.family:
            raise ConfigError(f"A candidate of {candidate.family!r} does not belong to the space {self.family!r}.")
        axes = {axis.name for axis in self.axes}
        # A launch option without an axis here has its default and is no value of the space.
        launch = {name: getattr(candidate.launch, name) for name in LAUNCH_NAMES if name in axes}
        if "maxnreg" not in axes and candidate.launch.maxnreg is not None:
            raise ConfigError(f"The space {self.family} has no axis 'maxnreg', so that a candidate cannot set it.")
        checked = self.candidate(dict(candidate.tunables), launch)
        return {**dict(checked.tunables), **launch}

    def _walk(self, checks: _Checks | None) -> Iterator[Candidate]:
        tunable = [axis.name for axis in self.axes if axis.kind == "tunable"]
        launch = [axis.name for axis in self.axes if axis.kind == "launch"]
        for values in self._walk_values(checks):
            yield _candidate(self.family, {n: values[n] for n in tunable}, {n: values[n] for n in launch})

    def _walk_values(self, checks: _Checks | None) -> Iterator[dict[str, Scalar]]:
        """Depth first over the axes; the yielded dict is reused from point to point."""
        sizes = [math.prod(len(axis.values) for axis in self.axes[depth:]) for depth in range(len(self.axes) + 1)]
        env: dict[str, Scalar] = dict(checks.base) if checks else {}

        def visit(depth: int) -> Iterator[dict[str, Scalar]]:
            if checks is not None and checks.refuses(depth, env, sizes[depth]):
                return
            if depth == len(self.axes):
                yield env
                return
            axis = self.axes[depth]
            for value in axis.values:
                env[axis.name] = value
                yield from visit(depth + 1)

        yield from visit(0)


class _Checks:
    """The restrictions of a space by the depth at which they can be decided, with results kept per axis values."""

    def __init__(self, space: SearchSpace, base: dict[str, Scalar]) -> None:
        self.base = base
        self.counts = {restriction.name: 0 for restriction in space.restrictions}
        self._definitions = space.definitions
        order = {axis.name: depth for depth, axis in enumerate(space.axes)}
        reads = _axes_read(space)
        self._levels: list[list[tuple[Restriction, tuple[str, ...], dict[tuple[Scalar, ...], bool]]]]
        self._levels = [[] for _ in range(len(space.axes) + 1)]
        for restriction in space.restrictions:
            axes = tuple(sorted(reads[restriction.name], key=order.__getitem__))
            depth = order[axes[-1]] + 1 if axes else 0
            self._levels[depth].append((restriction, axes, {}))

    def refuses(self, depth: int, env: Mapping[str, Scalar], block: int) -> bool:
        """Whether a restriction that can be decided at this depth refuses; if so it is charged with `block` points."""
        for restriction, axes, known in self._levels[depth]:
            key = tuple(env[name] for name in axes)
            if key not in known:
                known[key] = self._decide(restriction, axes, key)
            if not known[key]:
                self.counts[restriction.name] += block
                return True
        return False

    def _decide(self, restriction: Restriction, axes: tuple[str, ...], key: tuple[Scalar, ...]) -> bool:
        env = {**self.base, **dict(zip(axes, key, strict=True))}
        for name, expression in self._definitions:
            if (
                expression.names <= env.keys()
            ):  # a definition over axes that this restriction does not read is not needed
                env[name] = expression(env)
        return _holds(restriction, env)


def environment(spec: KernelSpec, arch: ArchSpec, device: DeviceClass | None = None) -> dict[str, Scalar]:
    """The names that expressions may read beside the axes: `SPEC_NAMES` and `ARCH_NAMES`."""
    if spec.arch != arch.name:
        raise ConfigError(f"The spec {spec.slug} is for {spec.arch}, not for {arch.name}.")
    return {
        "arch": spec.arch,
        "phase": spec.phase,
        "layout": spec.layout,
        "d_qk": spec.d_qk,
        "heads": spec.heads,
        "heads_pow2": max(16, 1 << (spec.heads - 1).bit_length()),  # 16: the least M of a tensor-core tile
        "topk": spec.topk,
        "extra_topk": spec.extra_topk,
        "keys": spec.keys_per_token,
        "page": spec.page,
        "extra_page": spec.extra_page,
        "tokens": spec.tokens,
        "dual": spec.dual,
        "fp8": spec.kv.fp8,
        "scale": spec.kv.scale,
        "group": spec.kv.group,
        "cc": arch.cc,
        "smem": arch.smem_limit,
        "smem_per_sm": arch.smem_per_sm,
        "regs_per_sm": arch.regs_per_sm,
        "max_regs": arch.max_regs,
        "max_warps": arch.max_warps,
        "mma": arch.mma,
        "tma": arch.tma,
        "clusters": arch.clusters,
        "tmem": arch.tmem_columns,
        "sms": device.sms if device else arch.max_sms,
    }


def load_space(family: str, root: Path | None = None) -> SearchSpace:
    """The search space of a family (`portable`); `root` is a configuration folder, by default `config_root()`."""
    return read_space(find_yaml((root or config_root()) / "spaces", family, "kernel family"))


def all_spaces(root: Path | None = None) -> dict[str, SearchSpace]:
    """Every search space of the configuration folder, by family."""
    return {name: read_space(path) for name, path in yaml_files((root or config_root()) / "spaces").items()}


def spaces_of(arch: str, gluon: bool = True) -> dict[str, SearchSpace]:
    """The spaces of the families that run on an arch; without `gluon` those that Triton's own compiler schedules, which are
    the ones that the cost model knows."""
    spaces = all_spaces()
    fits = {name: FAMILIES[name].archs is None or arch in (FAMILIES[name].archs or ()) for name in spaces}
    return {name: space for name, space in spaces.items() if fits[name] and (gluon or not FAMILIES[name].gluon)}


def read_space(path: Path) -> SearchSpace:
    """Read one space file; its stem is the family's name."""
    found = read_yaml(path).fields(("family", "axes", "restrictions"), ("definitions",))
    family = found["family"].text()
    if family != path.stem:
        found["family"].fail(f"the family is called {family!r} but its file is {path.name}; the two must agree.")
    axes = tuple(_axis(node, name) for name, node in found["axes"].mapping().items())
    if not any(axis.name == "num_warps" for axis in axes) or not any(axis.name == "num_stages" for axis in axes):
        found["axes"].fail("the launch axes num_warps and num_stages are needed.")
    known = [*SPEC_NAMES, *ARCH_NAMES, *(axis.name for axis in axes)]
    definitions: list[tuple[str, Expression]] = []
    for name, node in found["definitions"].mapping().items() if "definitions" in found else ():
        if name in known or not name.isidentifier():
            node.fail(f"{name!r} cannot name a definition: it is taken, or not an identifier.")
        definitions.append((name, _expression(node, known)))
        known.append(name)
    restrictions = tuple(_restriction(node, name, known) for name, node in found["restrictions"].mapping().items())
    return SearchSpace(family, axes, tuple(definitions), restrictions)


def _axis(node: Node, name: str) -> Axis:
    found = node.fields(("kind", "values"), ("ordinal",))
    kind = found["kind"].choice(KINDS, "kind of axis")
    if kind == "launch" and name not in LAUNCH_NAMES:
        hint = suggestion(name, LAUNCH_NAMES)
        node.fail(f"{name!r} is not a launch option{hint}; launch options: {', '.join(LAUNCH_NAMES)}.")
    if kind == "tunable" and name in LAUNCH_NAMES:
        node.fail(f"{name!r} is a launch option: its kind is launch, not tunable.")
    if name in SPEC_NAMES or name in ARCH_NAMES or not name.isidentifier() or name.startswith("_"):
        node.fail(f"{name!r} cannot name an axis: it is a field of the spec or the arch, or not an identifier.")
    values = tuple(item.scalar() for item in found["values"].items())
    if not values:
        found["values"].fail("expected at least one value.")
    if len(set(values)) != len(values):  # 1 and true count as one value, as they do in Python
        found["values"].fail("a value is listed twice.")
    for value in values:
        if kind == "launch" and not (_positive(value) or (name == "maxnreg" and value is None)):
            found["values"].fail(f"{value!r} is no value of the launch option {name}.")
    ordinal = found["ordinal"].boolean() if "ordinal" in found else False
    return Axis(name, values, ordinal, kind)


def _restriction(node: Node, name: str, known: list[str]) -> Restriction:
    found = node.fields(("require", "because"))
    if name == FEASIBLE:
        node.fail(f"{FEASIBLE!r} is the name of the points that remain.")
    return Restriction(name, _expression(found["require"], known), found["because"].text())


def _expression(node: Node, known: list[str]) -> Expression:
    try:
        return parse_expression(node.text(), known)
    except ConfigError as error:
        if str(error).startswith(f"{node.file}:"):
            raise
        node.fail(str(error))


def _axes_read(space: SearchSpace) -> dict[str, set[str]]:
    """Per restriction, the axes that decide it, definitions resolved."""
    reads: dict[str, set[str]] = {axis.name: {axis.name} for axis in space.axes}
    for name, expression in space.definitions:
        reads[name] = set().union(*(reads.get(read, set()) for read in expression.names))
    return {r.name: set().union(*(reads.get(read, set()) for read in r.expression.names)) for r in space.restrictions}


def _holds(restriction: Restriction, env: Mapping[str, Scalar]) -> bool:
    value = restriction.expression(env)
    if not isinstance(value, bool):
        raise ConfigError(f"The restriction {restriction.name!r} gives {value!r}, which is neither true nor false.")
    return value


def _check_value(axis: Axis, value: Scalar) -> None:
    # 1 == True in Python, but a kernel constant 1 is not the flag True: compare the type, too.
    if not any(type(value) is type(known) and value == known for known in axis.values):
        raise ConfigError(
            f"{value!r} is no value of the axis {axis.name!r}; it has {', '.join(map(repr, axis.values))}."
        )


def _positive(value: Scalar) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _candidate(family: str, tunables: Mapping[str, Scalar], launch: Mapping[str, Scalar]) -> Candidate:
    options = LaunchOptions(**launch)  # type: ignore[arg-type]  # _axis admits only positive integers (and None for maxnreg)
    return Candidate.make(family, tunables, options)
