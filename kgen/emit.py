"""Winners -> `generated/`: a folder that runs with torch and triton alone and can be vendored under any name.

    generated/dispatch.py …         the run-time half of kgen, copied file for file
    generated/compat/flash_mla.py   façades
    generated/<arch>/table.py       literal entries: shapes -> module and constants, with where each comes from
    generated/<arch>/<module>.py    rendered kernels, each text once; constants live in the table

Two emits of the same records, templates and sources give the same bytes, whatever the machine.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import kgen
from kgen.archs import ArchSpec, load_arch
from kgen.config import config_root
from kgen.errors import ConfigError
from kgen.models import all_models, model_specs
from kgen.records import RecordStore
from kgen.render import HELPERS, TRITON_RANGE, module_name, render_module, template_hash
from kgen.runtime.families import FAMILIES
from kgen.runtime.layouts import LAYOUTS
from kgen.runtime.table import Config, Entry, Provenance
from kgen.select import select_entries
from kgen.types import TuneRecord

MARK = "Emitted by kgen"
RUNTIME = Path(kgen.__file__).parent / "runtime"

INIT = '''"""Sparse-MLA attention kernels, {mark}: `from {package}.dispatch import sparse_mla`. Needs torch and triton only."""
'''

ARCH_INIT = '''"""Kernels and dispatch table of {arch}, {mark}."""
'''


@dataclass(frozen=True)
class Emission:
    """Relative path -> text of every file of a package, and its table by arch."""

    files: Mapping[str, str]
    tables: Mapping[str, tuple[Entry, ...]]


def read_records(folder: Path | None = None) -> tuple[list[TuneRecord], list[str]]:
    """Every record of configs/records/*.jsonl (compile results apart), and a warning per damaged file."""
    folder = folder or config_root() / "records"
    records: list[TuneRecord] = []
    warnings = []
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith("compile-"):
            continue
        loaded = RecordStore(path).load()
        records += loaded.records
        warning = loaded.warning(path.name)
        if warning:
            warnings.append(warning)
    return records, warnings


def arch_names() -> list[str]:
    return sorted(path.stem for path in (config_root() / "archs").glob("*.yaml"))


def template_hashes(arch: str | None = None) -> dict[str, str]:
    """Hash of every template, or of those that are rendered for one arch."""
    here = {name for name, family in FAMILIES.items() if arch is None or family.archs is None or arch in family.archs}
    return {name: template_hash(name) for name in TRITON_RANGE if name in here or name in HELPERS}


def build(records: Sequence[TuneRecord], package: str = "generated", archs: Iterable[str] | None = None) -> Emission:
    """All files of the package. ConfigError when `package` is no Python name."""
    if not all(part.isidentifier() for part in package.split(".")):
        raise ConfigError(f"{package!r} is no Python package name: use letters, digits and underscores.")
    files = {"__init__.py": INIT.format(mark=MARK, package=package)}
    for path in sorted(RUNTIME.rglob("*.py")):
        relative = path.relative_to(RUNTIME).as_posix()
        if relative != "__init__.py":
            files[relative] = path.read_text()
    tables: dict[str, tuple[Entry, ...]] = {}
    models = all_models()
    for name in archs or arch_names():
        arch = load_arch(name)
        specs = [spec for model in models.values() for spec in model_specs(model, name)]
        entries = tuple(select_entries(records, specs, arch, template_hashes()))
        tables[name] = entries
        files[f"{name}/__init__.py"] = ARCH_INIT.format(arch=name, mark=MARK)
        files[f"{name}/table.py"] = table_text(arch, entries)
        files |= _modules(name, entries)
    return Emission(files, tables)


_MODULE = re.compile(r"^(?P<family>[a-z0-9_]+?)_(?P<layout>" + "|".join(LAYOUTS) + r")(_c(?P<chunk>\d+))?$")


def _modules(arch: str, entries: Iterable[Entry]) -> dict[str, str]:
    """The kernels that the table points at, and those that every arch has."""
    files = {}
    for name in sorted({entry.module for entry in entries}):
        match = _MODULE.match(name)
        if match is None:
            raise ConfigError(f"A record names module {name!r}, which no template makes.")
        text = render_module(match["family"], match["layout"], arch, int(match["chunk"] or 0))
        files[f"{arch}/{name}.py"] = text
    files[f"{arch}/combine.py"] = render_module("combine", None, arch)
    files[f"{arch}/index_ops.py"] = render_module("index_ops", None, arch)
    for layout in LAYOUTS:
        files[f"{arch}/{module_name('cache_ops', layout)}.py"] = render_module("cache_ops", layout, arch)
    return files


# ---------------------------------------------------------------------------------------------- the table's text


def table_text(arch: ArchSpec, entries: Sequence[Entry]) -> str:
    """A literal that a person can read: configs once, then one line per entry."""
    configs = list(dict.fromkeys(entry.config for entry in entries))
    names = {config: f"C{number}" for number, config in enumerate(configs)}
    sources = list(dict.fromkeys(_origin(entry.provenance) for entry in entries))
    source_names = {origin: f"P{number}" for number, origin in enumerate(sources)}
    lines = [
        f'"""Dispatch table of {arch.name}, {MARK} {kgen.__version__}.',
        "",
        "Templates (hash):",
        *[f"    {name} {digest}" for name, digest in template_hashes(arch.name).items()],
        "",
        "One entry per line: the shapes it was made for (ranges inclusive), the kernel module, its constants, and where",
        'they come from: measured µs of the anchor\'s token count, or "static": ranked by a cost model, never timed.',
        '"""',
        "",
        "from dataclasses import replace",
        "",
        "from ..table import Entry, Provenance, config",
        "",
        "# patterns on the GPU's name; a leading ! excludes",
        "DEVICE_CLASSES = {",
        *[f"    {name!r}: {_patterns(device)!r}," for name, device in _devices(arch)],
        "}",
        "",
        "# kernel constants and launch options",
        *[f"{names[config]} = {_config_literal(config)}" for config in configs],
        "",
        "# where entries come from",
        *[f"{source_names[origin]} = {_literal(origin)}" for origin in sources],
        "",
        "",
        "def _e(layout, dual, heads, topk, extra_topk, page, extra_page, tokens, module, config, origin, tier=0, **facts):",
        "    made_for = layout, dual, heads, topk, extra_topk, page, extra_page, tokens",
        "    return Entry(*made_for, module, config, replace(origin, **facts), tier)",
        "",
        "",
        "ENTRIES: tuple[Entry, ...] = (",
        *[_entry_line(entry, names, source_names) for entry in entries],
        ")",
        "",
    ]
    return "\n".join(lines)


def _devices(arch: ArchSpec) -> list[tuple[str, object]]:
    devices = arch.devices
    values = devices.values() if isinstance(devices, Mapping) else devices
    return sorted((device.name, device) for device in values)


def _patterns(device: object) -> tuple[str, ...]:
    match, exclude = getattr(device, "match"), getattr(device, "exclude")  # noqa: B009 - one literal of two fields
    return (*match, *(f"!{pattern}" for pattern in exclude))


def _origin(provenance: Provenance) -> Provenance:
    """What many entries share; the numbers of one entry follow on its line."""
    return Provenance(
        source=provenance.source, device_class=provenance.device_class, gpu=provenance.gpu, triton=provenance.triton
    )


def _facts(provenance: Provenance) -> str:
    names = ("us", "estimate_us", "roofline", "anchor_tokens", "considered", "rejected")
    defaults = {f.name: f.default for f in fields(Provenance)}
    facts = [f"{n}={getattr(provenance, n)!r}" for n in names if getattr(provenance, n) != defaults[n]]
    return ", ".join(facts)


def _config_literal(config: Config) -> str:
    maxnreg = f", maxnreg={config.maxnreg}" if config.maxnreg is not None else ""
    tunables = "".join(f", {name}={value!r}" for name, value in config.tunables)
    return f"config({config.num_warps}, {config.num_stages}{maxnreg}{tunables})"


def _literal(value: Provenance) -> str:
    """Constructor call with the fields that differ from their defaults."""
    parts = []
    for field in fields(value):
        content = getattr(value, field.name)
        if content != field.default:
            parts.append(f"{field.name}={content!r}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _entry_line(entry: Entry, names: Mapping[Config, str], source_names: Mapping[Provenance, str]) -> str:
    shape = (entry.layout, entry.dual, entry.heads, entry.topk, entry.extra_topk, entry.page, entry.extra_page)
    head = ", ".join(repr(part) for part in (*shape, entry.tokens, entry.module))
    origin = source_names[_origin(entry.provenance)]
    tier = f"tier={entry.tier}, " if entry.tier else ""
    return f"    _e({head}, {names[entry.config]}, {origin}, {tier}{_facts(entry.provenance)}),"


# ---------------------------------------------------------------------------------------------- the folder


def differences(emission: Emission, out: Path) -> list[str]:
    """What `out` lacks, has too much, or has otherwise; empty when it is exactly the emission."""
    found = []
    for name, text in emission.files.items():
        path = out / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.read_bytes() != text.encode():
            found.append(f"{name} differs")
    found += [f"{name} is not emitted any more" for name in _surplus(emission, out)]
    return sorted(found)


def _surplus(emission: Emission, out: Path) -> list[str]:
    existing = {path.relative_to(out).as_posix() for path in out.rglob("*.py")} if out.is_dir() else set()
    return sorted(existing - set(emission.files))


def write(emission: Emission, out: Path) -> list[str]:
    """Write what differs, each file atomically; remove emitted files that are emitted no more. Gives the changed names.

    ConfigError when `out` holds Python files but is no emitted package: nothing of somebody else's is overwritten.
    """
    init = out / "__init__.py"
    if out.exists() and any(out.rglob("*.py")) and not (init.is_file() and MARK in init.read_text()):
        raise ConfigError(f"{out.name}/ holds Python files that kgen did not emit: choose another --out.")
    changed = []
    for name, text in emission.files.items():
        path = out / name
        if path.is_file() and path.read_bytes() == text.encode():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        changed.append(name)
    for name in _surplus(emission, out):
        (out / name).unlink()
        changed.append(name)
    return changed
