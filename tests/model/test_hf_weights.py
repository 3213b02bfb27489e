"""Model folders that survive a round trip, in one file or many, and errors that name everything."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_names, hf_weights, qwen3, safetensors_stream
from tests.model import hf_cases

SMALL = model_config.TINY.replace(vocab_size=48, hidden_size=32, num_heads=2, num_kv_heads=1)


def _random(config: model_config.Qwen3Config, seed: int = 0) -> nnx.State:
    """Parameters that are all different, made on the host."""
    _, params = qwen3.abstract(config)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)


def _assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("case", ["base", "tied", "sparse_step_2", "mlp_only", "dense", "yarn"])
def test_written_files_are_the_read_ones(tmp_path: pathlib.Path, case: str) -> None:
    folder = hf_cases.folder_of(tmp_path, case)
    config, _, params = hf_weights.read(folder)
    hf_weights.write(tmp_path / "again", config, params)
    before = safetensors.numpy.load_file(folder / hf_weights.WEIGHTS)
    after = safetensors.numpy.load_file(tmp_path / "again" / hf_weights.WEIGHTS)
    if config.tie_word_embeddings:
        before.pop("lm_head.weight")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert hf_weights.read_config(tmp_path / "again") == config


@pytest.mark.parametrize("max_shard_bytes", [1, 4_000, 20_000, 10**9])
def test_any_size_of_files_gives_the_same_parameters(
    tmp_path: pathlib.Path, max_shard_bytes: int
) -> None:
    config = SMALL.replace(mlp_only_layers=(1,), tie_word_embeddings=False)
    params = _random(config)
    hf_weights.write(tmp_path, config, params, max_shard_bytes=max_shard_bytes)
    _assert_same(hf_weights.read(tmp_path)[2], params)
    files = sorted(tmp_path.glob("*.safetensors"))
    tensors = [safetensors.numpy.load_file(file) for file in files]  # the library reads ours
    for part in tensors:
        size = sum(array.nbytes for array in part.values())
        assert size <= max_shard_bytes or len(part) == 1
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == [hf_weights.WEIGHTS]
        assert not (tmp_path / hf_weights.INDEX).exists()
    else:
        _check_index(tmp_path, tensors)
    assert not list(tmp_path.glob(".*")), "expected no temporary file to stay"


def _check_index(folder: pathlib.Path, tensors: list[dict[str, np.ndarray]]) -> None:
    index = json.loads((folder / hf_weights.INDEX).read_text(encoding="utf-8"))
    names = [f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i in range(len(tensors))]
    expected = {name: file for file, part in zip(names, tensors, strict=True) for name in part}
    assert index["weight_map"] == expected
    total = sum(array.nbytes for part in tensors for array in part.values())
    assert index["metadata"]["total_size"] == total


@given(sizes=st.lists(st.integers(0, 9), min_size=1), room=st.integers(1, 20))
def test_shards_are_consecutive_and_full(sizes: list[int], room: int) -> None:
    specs = [
        safetensors_stream.Spec(str(i), np.dtype(np.float32), (size,))
        for i, size in enumerate(sizes)
    ]
    parts = safetensors_stream.split(specs, 4 * room)
    assert [spec for part in parts for spec in part] == specs
    assert all(parts)
    totals = [sum(spec.shape[0] for spec in part) for part in parts]
    assert all(t <= room or len(p) == 1 for t, p in zip(totals, parts, strict=True))
    for total, following in zip(totals, parts[1:], strict=False):
        assert total + following[0].shape[0] > room, "expected the next tensor not to fit"


DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_any_stored_type_becomes_the_wanted_one(
    tmp_path: pathlib.Path, stored: np.dtype, target: np.dtype
) -> None:
    params = _random(SMALL)
    hf_weights.write(tmp_path, SMALL, params, dtype=stored)
    config = hf_weights.read_config(tmp_path)
    assert config.param_dtype == stored
    _, _, got = hf_weights.read(tmp_path, config.replace(param_dtype=target))
    _assert_same(got, jax.tree.map(lambda x: x.astype(stored).astype(target), params))


def test_a_target_can_ask_for_a_type_of_its_own(tmp_path: pathlib.Path) -> None:
    params = _random(SMALL)
    hf_weights.write(tmp_path, SMALL, params)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place), params
    )
    _, _, got = hf_weights.read(tmp_path, targets=targets)
    _assert_same(got, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    _, _, got = hf_weights.read(tmp_path, targets=jax.tree.map(lambda _: place, params))
    _assert_same(got, params)


def test_read_parameters_may_be_donated(tmp_path: pathlib.Path) -> None:
    """A CPU device takes over the arrays that were filled; training then reuses them."""
    params = _random(SMALL)
    hf_weights.write(tmp_path, SMALL, params)
    _, _, got = hf_weights.read(tmp_path)
    twice = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)
    _assert_same(twice(twice(got)), jax.tree.map(lambda x: 4 * x, params))


def test_numpy_parameters_are_written_too(tmp_path: pathlib.Path) -> None:
    params = _random(SMALL)
    hf_weights.write(tmp_path, SMALL, jax.tree.map(np.asarray, params))
    _assert_same(hf_weights.read(tmp_path)[2], params)


def test_the_folder_it_came_from_gives_tokenizer_and_settings(tmp_path: pathlib.Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    hf_weights.write(source, SMALL, _random(SMALL))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kept = {"eos_token_id": [7, 8], "bos_token_id": 3, "pad_token_id": None}
    (source / "config.json").write_text(json.dumps(config | kept | {"unknown": 1}))
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "tokenizer.json").write_bytes(b"\xff\x00")
    (source / "notes.txt").write_text("stays")
    hf_weights.write(out, SMALL, _random(SMALL, 1), like=source)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "tokenizer.json").read_bytes() == b"\xff\x00"
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert written == config | kept
    hf_weights.write(source, SMALL, _random(SMALL, 2), like=source)  # onto itself
    again = json.loads((source / "config.json").read_text(encoding="utf-8"))
    assert again == config | kept and (source / "notes.txt").exists()


@pytest.mark.parametrize(("before", "after"), [(9_000, 10**9), (10**9, 9_000), (9_000, 5_000)])
def test_nothing_of_a_former_model_stays(tmp_path: pathlib.Path, before: int, after: int) -> None:
    hf_weights.write(tmp_path, SMALL, _random(SMALL), max_shard_bytes=before)
    hf_weights.write(tmp_path, SMALL, _random(SMALL, 1), max_shard_bytes=after)
    _assert_same(hf_weights.read(tmp_path)[2], _random(SMALL, 1))
    fresh = tmp_path / "fresh"
    hf_weights.write(fresh, SMALL, _random(SMALL, 1), max_shard_bytes=after)
    names = {path.name for path in tmp_path.iterdir()} - {"fresh"}
    assert names == {path.name for path in fresh.iterdir()}


def test_a_write_that_fails_leaves_the_old_model(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_weights.write(tmp_path, SMALL, _random(SMALL))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, left = os.fsync, [3]

    def full_disk(file: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        hf_weights.write(tmp_path, SMALL, _random(SMALL, 1), max_shard_bytes=9_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("step", range(8))
def test_a_write_cut_off_anywhere_is_the_old_model_or_the_new_or_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    old, new = _random(SMALL), _random(SMALL, 1)
    hf_weights.write(tmp_path, SMALL, old, max_shard_bytes=20_000)
    calls = iter(range(1000))

    class Killed(BaseException):
        pass

    def dying(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == step:
                raise Killed
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "unlink", dying(pathlib.Path.unlink))
        patch.setattr(pathlib.Path, "replace", dying(pathlib.Path.replace))
        with pytest.raises(Killed):
            hf_weights.write(tmp_path, SMALL, new, max_shard_bytes=20_000)
    if (tmp_path / hf_weights.CONFIG).exists():
        _assert_same(hf_weights.read(tmp_path)[2], old)
    else:
        with pytest.raises(ModelError, match=r"config\.json: expected a file"):
            hf_weights.read(tmp_path)
    hf_weights.write(tmp_path, SMALL, new)  # and the next one mends it
    _assert_same(hf_weights.read(tmp_path)[2], new)


def test_arrays_are_asked_for_one_at_a_time(tmp_path: pathlib.Path) -> None:
    specs = [safetensors_stream.Spec(str(i), np.dtype(np.float32), (10,)) for i in range(4)]
    seen: list[int] = []

    def arrays() -> Iterator[np.ndarray]:
        for i in range(4):
            seen.append(sum(p.stat().st_size > 0 for p in tmp_path.glob(".*.tmp")))
            yield np.full(10, i, np.float32)

    safetensors_stream.write_folder(tmp_path, specs, arrays(), {"config.json": "{}"}, 40)
    assert seen == [0, 1, 2, 3], "expected each to be on disk before the next is made"


def test_parameters_of_another_configuration_are_not_written(tmp_path: pathlib.Path) -> None:
    other = SMALL.replace(num_experts=4, tie_word_embeddings=False)
    with pytest.raises(ModelError) as caught:
        hf_weights.write(tmp_path / "out", other, _random(SMALL))
    text = str(caught.value)
    assert "head: expected (32, 48), got None" in text
    assert "segments/0/router: expected (3, 32, 4), got (3, 32, 8)" in text
    assert not (tmp_path / "out").exists()


def test_targets_of_another_shape_are_refused(tmp_path: pathlib.Path) -> None:
    hf_weights.write(tmp_path, SMALL, _random(SMALL))
    _, wrong = qwen3.abstract(SMALL.replace(vocab_size=49))
    with pytest.raises(ValueError, match=r"targets: expected shape \(48, 32\), got \(49, 32\)"):
        hf_weights.read(tmp_path, targets=wrong)
    _, wrong = qwen3.abstract(SMALL.replace(tie_word_embeddings=False))
    with pytest.raises(ValueError, match="targets: expected a tree like the parameters"):
        hf_weights.read(tmp_path, targets=wrong)


def _rewritten(folder: pathlib.Path, changes: dict[str, np.ndarray | None]) -> None:
    tensors = safetensors.numpy.load_file(folder / hf_weights.WEIGHTS)
    for name, array in changes.items():
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
    safetensors.numpy.save_file(tensors, folder / hf_weights.WEIGHTS)


def test_everything_wrong_with_the_weights_is_named_at_once(tmp_path: pathlib.Path) -> None:
    folder = hf_cases.folder_of(tmp_path, "base")
    _rewritten(
        folder,
        {
            "model.layers.1.mlp.experts.3.up_proj.weight": None,
            "model.layers.2.self_attn.q_norm.weight": np.zeros(9, np.float32),
            "model.norm.weight": None,
            "model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32),
        },
    )
    with pytest.raises(ModelError) as caught:
        hf_weights.read(folder)
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.experts.3.up_proj.weight" in text
    assert "missing: model.norm.weight" in text
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert "expected shape (8,), got (9,): model.layers.2.self_attn.q_norm.weight" in text
    assert "do config.json and the weights belong together" in text


def test_many_of_a_kind_are_one_line(tmp_path: pathlib.Path) -> None:
    folder = hf_cases.folder_of(tmp_path, "base", num_local_experts=60)
    with pytest.raises(ModelError) as caught:
        hf_weights.read(folder)
    assert "162 of model.layers.*.mlp.experts.*.gate_proj.weight: " in str(caught.value)
    assert len(str(caught.value).splitlines()) < 10


def test_fused_experts_are_recognised(tmp_path: pathlib.Path) -> None:
    folder = hf_cases.folder_of(tmp_path, "base")
    fused = {f"model.layers.{i}.mlp.experts.gate_up_proj": np.zeros((6, 16, 16)) for i in range(3)}
    _rewritten(folder, {name: array.astype(np.float32) for name, array in fused.items()})
    with pytest.raises(ModelError, match="save_original_format=True"):
        hf_weights.read(folder)


def test_folders_and_files_that_are_none_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"expected model\.safetensors or"):
        hf_weights.read(tmp_path, SMALL)
    hf_weights.write(tmp_path, SMALL, _random(SMALL), max_shard_bytes=9_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"no", b"\x08" + 7 * b"\0" + b"nojson!!"):
        shards[1].write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model-00002-.*download it again"):
            hf_weights.read(tmp_path)
    for shard in shards[1:]:
        shard.unlink()
    with pytest.raises(ModelError, match=rf"missing, download them: \['{shards[1].name}'"):
        hf_weights.read(tmp_path)
    (tmp_path / hf_weights.WEIGHTS).write_bytes(whole)
    with pytest.raises(ModelError, match="got both: remove the stale one"):
        hf_weights.read(tmp_path)


def test_quantised_tensors_are_refused(tmp_path: pathlib.Path) -> None:
    folder = hf_cases.folder_of(tmp_path, "base")
    _rewritten(folder, {"model.norm.weight": np.zeros(16, np.int8)})
    with pytest.raises(ModelError, match=r"got 1 of other types, model\.norm\.weight \(I8\)"):
        hf_weights.read(folder)


@pytest.mark.parametrize("name", list(model_config.NAMED))
def test_names_and_shapes_cover_the_whole_model(name: str) -> None:
    """Every parameter has its tensors, and in the order of the file each comes once."""
    config = model_config.NAMED[name]
    _, params = qwen3.abstract(config)
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(params)}
    stacks = hf_names.stacks(config)
    assert {path: stack.shape for path, stack in stacks.items()} == shapes
    ordered = [name for rows in hf_names.in_file_order(stacks) for name in rows.names]
    assert len(ordered) == len(set(ordered))
    assert set(ordered) == {name for stack in stacks.values() for name in stack.names}
    layers = [int(name.split(".")[2]) for name in ordered if name.startswith("model.layers.")]
    assert layers == sorted(layers)
