"""What decides whether a kernel is right: reference, inputs, comparison, and proof that the comparison can see."""

from .cases import EDGE_CASES, CaseSpec, Inputs, core_edges, make_case, tuning_inputs
from .compare import TOLERANCES, Report, Tolerance, compare, deepinfer_rule, tolerance_for
from .reference import Reference, attention_reference
from .rounding import compare_any, references, roundings
from .shards import merge_shards, pad_heads, pad_topk, split_row

__all__ = [
    "EDGE_CASES",
    "TOLERANCES",
    "CaseSpec",
    "Inputs",
    "Reference",
    "Report",
    "Tolerance",
    "attention_reference",
    "compare",
    "compare_any",
    "core_edges",
    "deepinfer_rule",
    "make_case",
    "merge_shards",
    "pad_heads",
    "pad_topk",
    "references",
    "roundings",
    "split_row",
    "tolerance_for",
    "tuning_inputs",
]
