"""The reader of HLO text against small modules: written by hand, and compiled here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from clawgym_jax.compiled.flops import convolution_flops, count_flops
from clawgym_jax.compiled.hlo import HloError, Shape, array_shapes, parse
from clawgym_jax.compiled.traffic import bytes_by_kind, group_size, transfers
from clawgym_jax.compiled.trips import UnknownTripCount, run_counts

LOOP = """
HloModule m, entry_computation_layout={(f32[4,8])->f32[4,8]}

%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w = f32[8,8]{1,0} constant({...}), metadata={op_name="a \\"quoted, (name"}
  %y = f32[4,8] dot(%x, %w), lhs_contracting_dims={1}, metadata={op_name="dot"}
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%next, %y)
}

%condition (t: (s32[], f32[4,8])) -> pred[] {
  %t.1 = (s32[], /*index=1*/f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %go = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(2)
  %start = (s32[], f32[4,8]{1,0}) tuple(%zero, %p)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_module_is_read() -> None:
    module = parse(LOOP.replace("LIMIT", "7"))
    body = module.computations["body"]
    assert body.root.opcode == "tuple" and body.root.operands == ("next", "y")
    assert body.instructions["y"].ints("lhs_contracting_dims") == (1,)
    assert body.instructions["t"].shapes == (Shape("s32", ()), Shape("f32", (4, 8)))
    assert module.entry.instructions["loop"].called() == [
        ("condition", "condition"), ("body", "body"),
    ]  # fmt: skip


def test_a_condition_tells_the_rounds_where_the_compiler_noted_none() -> None:
    module = parse(LOOP.replace("LIMIT", "7"))
    assert run_counts(module) == {"main": 1, "body": 5, "condition": 6}
    assert count_flops(module).total == 5 * 2 * 4 * 8 * 8
    assert dict(count_flops(module).by_source) == {"dot": 5 * 512}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%limit = s32[] constant(LIMIT)", "%limit = s32[] get-tuple-element(%t.1), index=0"),
        ("constant(1)", "constant(3)"),  # steps of three
        ("direction=LT", "direction=NE"),
        ("%zero = s32[] constant(2)", '%zero = s32[] custom-call(), custom_call_target="x"'),
    ],
)
def test_an_unknown_number_of_rounds_is_an_error_that_names_the_loop(old: str, new: str) -> None:
    assert old in LOOP
    module = parse(LOOP.replace(old, new).replace("LIMIT", "7"))
    with pytest.raises(UnknownTripCount, match="the loop loop in main"):
        run_counts(module)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ENTRY %main", "%main", "ENTRY computation"),
        ("dot(%x, %w)", "dot(%x, %gone)", "takes 'gone'"),
        ("f32[4,8] dot", "f33[4,8] dot", "unknown element type 'f33'"),
        ("dot(%x, %w), lhs", "dot(%x, %w, lhs", r"expected '\)'"),
    ],
)
def test_text_that_cannot_be_read_is_an_error(old: str, new: str, said: str) -> None:
    assert old in LOOP
    with pytest.raises(HloError, match=said):
        parse(LOOP.replace(old, new))


def test_shapes() -> None:
    assert array_shapes("(bf16[3,5], /*index=1*/u8[<=7], pred[])") == (
        Shape("bf16", (3, 5)), Shape("u8", (7,)), Shape("pred", ()),
    )  # fmt: skip
    assert [s.bytes for s in array_shapes("bf16[3,5] s4[3] f64[]")] == [30, 2, 8]


def convolution(result: str, left: str, right: str, attributes: str) -> int:
    text = (
        f"ENTRY %e (a: f32[]) -> f32[] {{\n  %a = {left} parameter(0)\n"
        f"  %b = {right} parameter(1)\n"
        f"  ROOT %c = {result} convolution(%a, %b), {attributes}\n}}\n"
    )
    entry = parse(text).entry
    return convolution_flops(entry, entry.root)


def test_convolutions_that_are_matrix_products() -> None:
    plain = convolution("f32[4,16]", "f32[4,8]", "f32[8,16]", "dim_labels=bf_io->bf")
    assert plain == 2 * 4 * 8 * 16
    batched = convolution(  # a batch of 3 as a dilated axis: of 3 x 3 taps 3 are real
        "f32[3,4,16]", "f32[3,4,8]", "f32[3,8,16]",
        "window={size=3 stride=2 pad=2_2 lhs_dilate=3 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
    )  # fmt: skip
    assert batched == 3 * 2 * 4 * 8 * 16
    same = convolution(  # an ordinary one with padding: the outer taps fall outside
        "f32[1,5,2]", "f32[1,5,3]", "f32[3,3,2]", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    )
    assert same == 2 * 2 * 3 * (5 * 3 - 2)


def test_a_compiled_scan_with_its_gradient_counts_what_the_mathematics_says() -> None:
    n, b, d = 5, 4, 16

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(carry @ weight), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, d, d), (b, d))]
    text = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile().as_text()
    # Forward, weights' gradients, inputs' gradients: n products each; the compiler may drop the
    # gradient of the very first input (nobody asks for it) only outside the scan, so it stays.
    assert count_flops(parse(text)).total == 3 * n * 2 * b * d * d


COLLECTIVES = """
HloModule m

ENTRY %main (p: f32[8,128]) -> f32[64,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %s = (f32[8,128], f32[64,128]) all-gather-start(%p), channel_id=3, replica_groups=[1,8]<=[8]
  %g = f32[64,128]{1,0} all-gather-done(%s)
  %r = f32[64,128]{1,0} all-reduce(%g), channel_id=4, replica_groups=[2,4]<=[8], to_apply=%sum
  %r2 = f32[64,128]{1,0} all-reduce(%r), channel_id=4, replica_groups=[2,4]<=[8], to_apply=%sum
  %c = f32[16,128]{1,0} reduce-scatter(%r2), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum
  %e = f32[16,128]{1,0} all-to-all(%c), channel_id=1, replica_groups={}, dimensions={0}
  ROOT %q = f32[16,128]{1,0} collective-permute(%e), channel_id=9, source_target_pairs={{0,1}}
}
"""


def test_bytes_of_collectives() -> None:
    found = transfers(parse(COLLECTIVES), devices=8)
    row = 128 * 4
    assert bytes_by_kind(found) == {
        "all-reduce": 2 * 64 * row * 3 // 4,  # once: a channel is one transfer
        "all-gather": 7 * 8 * row,
        "reduce-scatter": 64 * row * 3 // 4,
        "all-to-all": 16 * row * 7 // 8,
        "collective-permute": 16 * row,
    }
    groups = {t.kind: t.group for t in found}
    assert groups["all-reduce"] == 4 and groups["all-to-all"] == 8


@pytest.mark.parametrize(
    ("printed", "group"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=2,'b'=4]{'b':(2)2}", 2),
        ("{{0,2},{1,3}}", 2),
        ("[16,16]<=[16,16]T(1,0)", 16),
    ],
)
def test_forms_of_groups(printed: str, group: int) -> None:
    text = COLLECTIVES.replace("replica_groups={}", f"replica_groups={printed}")
    assert group_size(parse(text).entry.instructions["e"], 8) == group


def test_groups_that_cannot_be_read_are_an_error() -> None:
    text = COLLECTIVES.replace("replica_groups={}", "replica_groups=?")
    entry = parse(text).entry
    with pytest.raises(HloError, match="replica groups"):
        group_size(entry.instructions["e"], 8)
