"""docs/adding.md is accurate: its examples load as they stand, and its lists of names are the code's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kgen.archs import load_arch
from kgen.config import config_root
from kgen.models import anchor_specs, load_model, model_specs
from kgen.space import ARCH_NAMES, SPEC_NAMES, load_space

GUIDE = (Path(__file__).parents[2] / "docs" / "adding.md").read_text(encoding="utf-8")
MODEL, SPACE = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def test_examples_load(tmp_path: Path) -> None:
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    (root / "models" / "tiny.yaml").write_text(MODEL)
    (root / "spaces" / "portable.yaml").write_text(SPACE)
    specs = model_specs(load_model("tiny", root), "sm90")
    assert [spec.heads for spec in specs] == [48, 48, 48, 24, 24, 24, 8, 8, 8]
    assert model_specs(load_model("tiny", root), "sm120") == []
    assert [(s.heads, s.tokens) for s in anchor_specs(load_model("tiny", root), "sm90")] == [
        (48, 1),
        (48, 16),
        (8, 1),
        (8, 16),
    ]
    space = load_space("portable", root)
    counts = space.explain(specs[-1], load_arch("sm90", root))  # 8 heads: only block_h 16 remains
    assert counts == {"heads_block": 8, "feasible": 4}


def test_names_are_the_codes() -> None:
    spec_names = re.search(r"of the spec: `([^`]*)`", GUIDE)
    arch_names = re.search(r"of the arch: `([^`]*)`", GUIDE)
    assert spec_names and tuple(spec_names[1].split()) == SPEC_NAMES
    assert arch_names and tuple(arch_names[1].split()) == ARCH_NAMES
