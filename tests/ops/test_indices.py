"""Request-local positions -> slots against a plain loop (spec 2.1), over drawn shapes, pages, gaps and bad values."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .kernels import convert

INT_MAX = 2**31 - 1


def _loop(
    indices: list[list[int]], table: list[list[int]], requests: list[int], page: int, page_rows: int
) -> tuple[list[list[int]], list[int]]:
    out = []
    for row, request in zip(indices, requests, strict=True):
        line = []
        for token in row:
            slot = -1
            if 0 <= request < len(table) and 0 <= token // page < len(table[0]) and token >= 0:
                block = table[request][token // page]
                if block >= 0 and block * page_rows + token % page <= INT_MAX:
                    slot = block * page_rows + token % page
            line.append(slot)
        out.append(line)
    return out, [sum(s >= 0 for s in line) for line in out]


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int], int, int]:
    page = draw(st.sampled_from([1, 2, 3, 61, 64, 256]))
    page_rows = page + draw(st.sampled_from([0, 1, 5, 192]))
    requests, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    tokens, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 16, 33, 100]))
    block = st.one_of(st.integers(0, 1000), st.sampled_from([-1, -5, INT_MAX, INT_MAX // page_rows]))
    position = st.one_of(st.integers(0, page * (columns + 1)), st.sampled_from([-1, -(2**31), INT_MAX, page * columns]))
    table = draw(st.lists(st.lists(block, min_size=columns, max_size=columns), min_size=requests, max_size=requests))
    rows = draw(st.lists(st.lists(position, min_size=width, max_size=width), min_size=tokens, max_size=tokens))
    owners = st.one_of(st.integers(0, requests - 1), st.sampled_from([-1, requests, INT_MAX]))
    return rows, table, draw(st.lists(owners, min_size=tokens, max_size=tokens)), page, page_rows


@settings(max_examples=80, deadline=None)
@given(_problems())
def test_agrees_with_a_loop(problem: tuple[list[list[int]], list[list[int]], list[int], int, int]) -> None:
    rows, table, requests, page, page_rows = problem
    want, want_counts = _loop(rows, table, requests, page, page_rows)
    counts = torch.full((len(rows),), -9, dtype=torch.int32)
    got = convert(_int32(rows), _int32(table), _int32(requests), page, page_stride_rows=page_rows, counts=counts)
    assert got.tolist() == want and got.dtype == torch.int32
    assert counts.tolist() == want_counts


def test_rows_wider_than_a_step() -> None:
    """2,500 positions take three steps of 1,024; the count adds up over them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-50, 700, (2, 2500), generator=generator, dtype=torch.int32)
    table = torch.randperm(40, generator=generator).int().view(4, 10)
    counts = torch.empty(2, dtype=torch.int32)
    got = convert(rows, table, _int32([3, 1]), 64, counts=counts)
    want, want_counts = _loop(rows.tolist(), table.tolist(), [3, 1], 64, 64)
    assert got.tolist() == want and counts.tolist() == want_counts


def test_in_place_strided_and_three_dimensional() -> None:
    pool = torch.arange(2 * 2 * 12, dtype=torch.int32).view(2, 2, 12)
    table_pool = _int32([[7, 3, 99, 99], [2, -1, 99, 99]])
    rows, table = pool[:, :, :9].reshape(4, 9), table_pool[:, :2]
    want, _ = _loop(rows.tolist(), table.tolist(), [0, 1, 1, 0], 16, 20)
    before = pool.clone()
    view = pool[:, :, :9]
    assert convert(view, table, _int32([0, 1, 1, 0]), 16, page_stride_rows=20, out=view) is view
    assert view.reshape(4, 9).tolist() == want
    assert torch.equal(pool[:, :, 9:], before[:, :, 9:])
    single = before[:, :1, :9].clone()
    assert convert(single, table, _int32([0, 1]), 16).shape == (2, 1, 9)


def test_nothing_to_do() -> None:
    table = _int32([[0]])
    assert convert(torch.empty(0, 5, dtype=torch.int32), table, _int32([]), 4).shape == (0, 5)
    counts = _int32([7, 7])
    assert convert(torch.empty(2, 0, dtype=torch.int32), table, _int32([0, 0]), 4, counts=counts).shape == (2, 0)
    assert counts.tolist() == [0, 0]
