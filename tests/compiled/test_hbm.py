"""Bytes to and from the large memory, of small modules whose traffic is counted by hand."""

from __future__ import annotations

import pytest

from clawgym_jax.compiled.hbm import moved_bytes
from clawgym_jax.compiled.hlo import parse

ROW = 128 * 4  # bytes of f32[128]
WHOLE = 64 * ROW  # of f32[64,128]


def moved(entry: str, *computations: str) -> int:
    parts = [*computations, f"ENTRY %main (p: f32[64,128]) -> f32[64,128] {{\n{entry}\n}}"]
    return moved_bytes(parse("\n\n".join(parts) + "\n"))


PARAMETER = "  %p = f32[64,128]{1,0} parameter(0)\n  %i = s32[]{:S(6)} parameter(1)\n"


def fusion(body: str, result: str = "f32[64,128]{1,0}") -> int:
    """A module that is one fusion of `p` f32[64,128] and `i` with this body."""
    inside = f"%fused (a: f32[64,128], b: s32[]) -> f32[] {{\n{body}\n}}"
    return moved(
        f"{PARAMETER}  ROOT %f = {result} fusion(%p, %i), kind=kLoop, calls=%fused",
        "%pass (c: f32[64,128]) -> f32[64,128] {\n"
        "  %c = f32[64,128]{1,0} parameter(0)\n"
        "  ROOT %d = f32[64,128]{1,0} bitcast(%c)\n}",
        "%cut (g: f32[64,128], h: s32[]) -> f32[1,128] {\n"
        "  %g = f32[64,128]{1,0} parameter(0)\n"
        "  %h = s32[] parameter(1)\n"
        "  ROOT %s = f32[1,128]{1,0} dynamic-slice(%g, %h, %h)\n}",
        inside,
    )


A = "  %a = f32[64,128]{1,0} parameter(0)\n  %b = s32[] parameter(1)\n"
ON_CHIP = "f32[1,128]{1,0:S(1)}"


@pytest.mark.parametrize(
    ("body", "result", "expected"),
    [
        pytest.param("  ROOT %o = f32[64,128] negate(%a)", "f32[64,128]{1,0}", 2 * WHOLE, id="all"),
        pytest.param("  ROOT %o = f32[64,128] negate(%a)", ON_CHIP, WHOLE, id="stays-on-chip"),
        pytest.param(
            "  %q = f32[1,128] dynamic-slice(%a, %b, %b)\n  ROOT %o = f32[1,128] negate(%q)",
            ON_CHIP, ROW, id="a-row",
        ),
        pytest.param(
            "  %q = f32[1,128] fusion(%a, %b), kind=kLoop, calls=%cut\n"
            "  ROOT %o = f32[1,128] negate(%q)",
            ON_CHIP, ROW, id="a-row-by-an-inner-fusion",
        ),
        pytest.param(
            "  %q = f32[64,128] fusion(%a), kind=kLoop, calls=%pass\n"
            "  %r = f32[1,128] dynamic-slice(%q, %b, %b)\n  ROOT %o = f32[1,128] negate(%r)",
            ON_CHIP, ROW, id="a-row-of-what-an-inner-fusion-passes-on",
        ),
        pytest.param(  # an output layer's weight reaches its product like this
            "  %q = f32[64,128] fusion(%a), kind=kLoop, calls=%pass\n"
            "  ROOT %o = f32[64,64] dot(%q, %q), lhs_contracting_dims={1}",
            ON_CHIP, WHOLE, id="all-of-what-an-inner-fusion-passes-on",
        ),
        pytest.param("  ROOT %o = f32[64,128] copy(%a)", ON_CHIP, WHOLE, id="copied"),
        pytest.param(
            "  %u = f32[1,128] constant({...})\n"
            "  ROOT %o = f32[64,128] dynamic-update-slice(%a, %u, %b, %b)",
            "f32[64,128]{1,0}", 2 * ROW, id="a-row-updated-in-place",
        ),
        pytest.param(  # int8 has other tiles where it is updated
            "  %q = f32[64,128] fusion(%a), kind=kLoop, calls=%pass\n"
            "  %u = f32[1,128] constant({...})\n"
            "  ROOT %o = f32[64,128] dynamic-update-slice(%q, %u, %b, %b)",
            "f32[64,128]{1,0}", 2 * ROW, id="a-row-of-what-an-inner-fusion-passes-on-updated",
        ),
        pytest.param(
            "  %z = f32[] constant(0)\n  %w = f32[64,128] broadcast(%z), dimensions={}\n"
            "  %u = f32[1,128] dynamic-slice(%a, %b, %b)\n"
            "  ROOT %o = f32[64,128] dynamic-update-slice(%w, %u, %b, %b)",
            "f32[64,128]{1,0}", ROW + WHOLE, id="a-new-array-with-a-row-in-it",
        ),
    ],
)  # fmt: skip
def test_a_fusion_reads_what_it_uses_and_writes_what_it_changes(
    body: str, result: str, expected: int
) -> None:
    assert fusion(A + body, result) == expected


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("f32[64,128]{1,0} negate(%p)", 2 * WHOLE),
        ("f32[64,128]{1,0} bitcast(%p)", 0),
        ("f32[4,128]{1,0} slice(%p), slice={[0:4], [0:128]}", 8 * ROW),
        ("s32[64,128]{1,0} iota(), iota_dimension=0", WHOLE),
        ("f32[64,128]{1,0} broadcast(%i), dimensions={}", WHOLE),
    ],
)
def test_single_instructions(instruction: str, expected: int) -> None:
    assert moved(f"{PARAMETER}  ROOT %o = {instruction}") == expected


@pytest.mark.parametrize(
    ("start", "done", "expected"),
    [
        (
            "(f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%p)",
            "f32[64,128]{1,0:S(1)} copy-done(%s)", WHOLE,
        ),
        (
            "(f32[64,128]{1,0}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%p)",
            "f32[64,128]{1,0} copy-done(%s)", 2 * WHOLE,
        ),
        (
            "((f32[64,128]{1,0}), f32[4,128]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%p), "
            "slice={[0:4], [0:128]}",
            "f32[4,128]{1,0:S(1)} slice-done(%s)", 4 * ROW,
        ),
        (
            "(f32[64,128]{1,0}, f32[256,128]{1,0}) all-gather-start(%p), dimensions={0}",
            "f32[256,128]{1,0} all-gather-done(%s)", 5 * WHOLE,
        ),
    ],
    ids=["onto-the-chip", "within-the-memory", "a-part-onto-the-chip", "all-gather"],
)  # fmt: skip
def test_an_asynchronous_pair_is_counted_once(start: str, done: str, expected: int) -> None:
    assert moved(f"{PARAMETER}  %s = {start}\n  ROOT %o = {done}") == expected
