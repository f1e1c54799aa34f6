"""What is emitted: deterministic, complete for every model, importable with torch and triton alone, and checked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kgen import emit
from kgen.archs import load_arch
from kgen.demo import RUNNER, isolated_prelude, isolated_python
from kgen.errors import ConfigError
from kgen.models import all_models, model_specs
from kgen.runtime.select import is_exact, select
from kgen.runtime.table import Entry, Shape
from kgen.select import summary

ROOT = Path(__file__).parents[2]
RECORDS = emit.read_records()[0]
EMISSION = emit.build(RECORDS)
ARCHS = ("sm90", "sm100", "sm120", "sm121")


def shapes(arch: str) -> list[Shape]:
    specs = [spec for model in all_models().values() for spec in model_specs(model, arch)]
    return [Shape(s.layout, s.heads, s.topk, s.page, s.tokens, s.extra_topk, s.extra_page) for s in specs]


def test_checked_in_package_is_what_would_be_written() -> None:
    assert emit.differences(EMISSION, ROOT / "generated") == []


def test_two_emits_are_equal_whatever_the_order_and_hash_seed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kgen import emit;"
        "emit.write(emit.build(emit.read_records()[0]), Path(sys.argv[1]))"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], check=True, cwd=ROOT, env=environment)
    for name, text in EMISSION.files.items():
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() == text.encode(), name


@pytest.mark.parametrize("arch", ARCHS)
def test_every_shape_of_every_model_has_an_entry(arch: str) -> None:
    """B13: what the YAML of a model needs is a subset of the table. On SM90 an exact entry may be measured or static."""
    entries = EMISSION.tables[arch]
    missing = [shape for shape in shapes(arch) if not any(is_exact(entry, shape) for entry in entries)]
    assert missing == []


@pytest.mark.parametrize("arch", ARCHS)
def test_runner_up_is_the_choice_without_the_winner(arch: str) -> None:
    """Decision 23, for every key: removing the winner from the table gives the entry that excluding it gives."""
    entries = EMISSION.tables[arch]
    for shape in shapes(arch)[::7]:
        winner = select(entries, shape, "h200")
        assert winner is not None
        without = select([e for e in entries if e != winner.entry], shape, "h200")
        excluded = select(entries, shape, "h200", exclude=(winner.entry,))
        assert without is not None and excluded is not None and without.entry == excluded.entry != winner.entry


def test_only_sm90_claims_times() -> None:
    for arch in ARCHS:
        sources = {entry.provenance.source for entry in EMISSION.tables[arch]}
        assert sources == ({"measured", "inherited", "static"} if arch == "sm90" else {"static"})
        for entry in EMISSION.tables[arch]:
            assert (entry.provenance.us is None) == (entry.provenance.source == "static")
            assert entry.provenance.source != "static" or entry.provenance.considered > 0


def test_size_and_number_of_kernels() -> None:
    assert sum(len(text) for text in EMISSION.files.values()) < 10e6
    assert sum(summary(entries)["kernels"] for entries in EMISSION.tables.values()) <= 400


def test_a_stale_template_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """B57: a record of another template text never becomes an entry."""
    changed = [replace(record, template_hash="0" * 16) for record in RECORDS[:50]]
    assert emit.build(changed, archs=["sm90"]).tables["sm90"] == ()


def test_widths_that_grow_leave_no_gap() -> None:
    """Ratio-128 layers: every width from 1 up is inside exactly one entry's range."""
    grown = [e for e in EMISSION.tables["sm120"] if e.extra_page == 2 and e.heads == 64 and e.tokens[0] == 1]
    assert grown
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in grown:
        groups.setdefault((entry.layout, entry.topk, entry.page, entry.tokens), []).append(entry)
    for group in groups.values():
        ranges = sorted(entry.extra_topk for entry in group)
        assert ranges[0][0] == 1 and ranges[-1][1] == 2**31 - 1
        assert all(low[1] + 1 == high[0] for low, high in zip(ranges, ranges[1:], strict=False))
        assert not any(entry.config.get("specialise", False) for entry in group)


def test_check_sees_every_kind_of_difference(tmp_path: Path) -> None:
    out = tmp_path / "generated"
    emit.write(EMISSION, out)
    (out / "dispatch.py").write_text("# edited\n")
    (out / "sm90" / "combine.py").unlink()
    (out / "stray.py").write_text("")
    assert emit.differences(EMISSION, out) == [
        "dispatch.py differs", "sm90/combine.py is missing", "stray.py is not emitted any more",
    ]  # fmt: skip
    assert emit.write(EMISSION, out) == ["dispatch.py", "sm90/combine.py", "stray.py"]
    assert emit.differences(EMISSION, out) == [] == emit.write(EMISSION, out)


def test_nothing_foreign_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("precious = 1\n")
    with pytest.raises(ConfigError, match="did not emit"):
        emit.write(EMISSION, tmp_path)
    assert (tmp_path / "mine.py").read_text() == "precious = 1\n" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigError, match="no Python package name"):
        emit.build(RECORDS, "my-kernels")


def test_emitted_text_has_no_traces() -> None:
    for name, text in EMISSION.files.items():
        compile(text, name, "exec")
        assert "{{" not in text.replace("{{", "", 0) or 'f"' in text or "f'" in text, name
        assert "{%" not in text and "import kgen" not in text and "from kgen" not in text, name


def test_vendored_under_another_name_without_kgen(tmp_path: Path) -> None:
    """Decision 27's environment: torch, triton and numpy only, another package name, the interpreter."""
    import torch

    emit.write(emit.build(RECORDS, "demo_kernels", archs=["sm90"]), tmp_path / "demo_kernels")
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 8, 576, generator=generator).bfloat16()
    kv = torch.randn(40, 576, generator=generator).bfloat16()
    indices = torch.randint(0, 40, (2, 24), generator=generator, dtype=torch.int32)
    torch.save({"a": {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.05, "kv_layout": "bf16"}}, tmp_path / "in.pt")
    files = [str(tmp_path), str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), "cpu"]
    command = [*isolated_python(tmp_path), "-W", "ignore", "-c", isolated_prelude(tmp_path) + RUNNER, *files]
    subprocess.run(
        command, check=True, env={"TRITON_INTERPRET": "1", "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    )
    out, lse, top = torch.load(tmp_path / "out.pt")["a"]
    keys = kv[indices.long()].double()
    scores = torch.einsum("thd,tkd->thk", q.double(), keys) * 0.05
    truth = torch.einsum("thk,tkd->thd", scores.softmax(-1), keys[..., :512])
    assert ((out.double() - truth).norm() / truth.norm()) < 4e-3
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4 and (top - scores.amax(-1)).abs().max() < 1e-4


def test_a_module_of_another_arch_is_refused(tmp_path: Path) -> None:
    """B51: the arch is written into each module and looked at before a launch."""
    package = tmp_path / "mixed_kernels"
    emit.write(emit.build(RECORDS, "mixed_kernels", archs=["sm90"]), package)
    name = EMISSION.tables["sm90"][0].module
    path = package / "sm90" / f"{name}.py"
    path.write_text(path.read_text().replace("ARCH = 'sm90'", "ARCH = 'sm120'"))
    code = (
        "from mixed_kernels.launch import load_modules\n"
        f"try:\n    load_modules('mixed_kernels', 'sm90', {name!r})\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "was emitted for sm120, not sm90" in done.stdout


def test_arch_files_name_their_devices() -> None:
    table = EMISSION.files["sm90/table.py"]
    for device in ("h100", "h200", "h20", "h800"):
        assert load_arch("sm90").device(device) is not None and f"'{device}': (" in table
